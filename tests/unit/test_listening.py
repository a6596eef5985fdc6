"""The daemon takes its port before loading, at all addresses of the host, and from no program."""

import errno
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from server.http.listening import listening, url


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")


@contextmanager
def program(host: str = "127.0.0.1") -> Iterator[int]:
    """Another program that listens; its port."""
    with socket.create_server((host, 0)) as listener:
        yield listener.getsockname()[1]


def name_of(*hosts: str) -> Callable[..., list[tuple[object, ...]]]:
    """A `getaddrinfo` by which every name has these addresses. macOS lists ::1 first of localhost,
    and /etc/hosts may list an address twice.
    """

    def getaddrinfo(host: str, port: int, **options: int) -> list[tuple[object, ...]]:
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (each, port, 0, 0))
            if ":" in each
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port))
            for each in hosts
        ]

    return getaddrinfo


class BsdSocket(socket.socket):
    """Binds to one address while a program listens on all, and the other way round, as on BSD."""

    def bind(self, address: tuple[str, int]) -> None:  # type: ignore[override]
        super().bind((address[0], 0))


def ports(sockets: Sequence[socket.socket]) -> list[int]:
    return [listener.getsockname()[1] for listener in sockets]


def test_only_one_of_two_daemons_that_load_gets_a_port() -> None:
    with listening("127.0.0.1", 0) as sockets:
        (port,) = ports(sockets)
        with pytest.raises(OSError, match="in use") as refused, listening("127.0.0.1", port):
            pass
    assert refused.value.errno == errno.EADDRINUSE
    with listening("127.0.0.1", port) as sockets:
        assert ports(sockets) == [port]


@pytest.mark.parametrize(("theirs", "ours"), [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "0.0.0.0")])
def test_a_port_on_which_another_program_answers_is_taken(
    monkeypatch: pytest.MonkeyPatch, theirs: str, ours: str
) -> None:
    with program(theirs) as port:
        monkeypatch.setattr(socket, "socket", BsdSocket)
        with pytest.raises(OSError, match="in use"), listening(ours, port):
            pass


@needs_ipv6
def test_it_listens_at_all_addresses_of_a_name_on_one_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as names:
        names.setattr(socket, "getaddrinfo", name_of("::1", "127.0.0.1", "127.0.0.1"))
        with listening("localhost", 0) as sockets:
            port, other_port = ports(sockets)
            assert port == other_port
            expected = [f"http://[::1]:{port}/v1", f"http://127.0.0.1:{port}/v1"]
            assert [url(each) for each in sockets] == expected
            names.undo()
            for host in ("::1", "127.0.0.1"):
                socket.create_connection((host, port), 10).close()


@needs_ipv6
def test_a_port_that_is_taken_at_one_address_is_given_back_at_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with program() as port:
        monkeypatch.setattr(socket, "getaddrinfo", name_of("::1", "127.0.0.1"))
        with pytest.raises(OSError, match="in use"), listening("localhost", port):
            pass
        monkeypatch.setattr(socket, "getaddrinfo", name_of("::1"))
        with listening("localhost", port) as sockets:
            assert ports(sockets) == [port]


@needs_ipv6
def test_a_free_port_is_free_at_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel chooses it for the first address alone."""
    with program() as taken:
        chosen = iter((taken, 0))

        class ChoosingSocket(socket.socket):
            def bind(self, address: tuple[str, int]) -> None:  # type: ignore[override]
                port = next(chosen) if self.family == socket.AF_INET6 else address[1]
                super().bind((address[0], port))

        monkeypatch.setattr(socket, "getaddrinfo", name_of("::1", "127.0.0.1"))
        monkeypatch.setattr(socket, "socket", ChoosingSocket)
        with listening("localhost", 0) as sockets:
            port, other_port = ports(sockets)
            assert port == other_port != taken


def test_an_address_that_the_machine_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """/etc/hosts lists ::1 on machines without IPv6, too."""
    monkeypatch.setattr(socket, "getaddrinfo", name_of("2001:db8::1", "127.0.0.1"))
    with listening("localhost", 0) as sockets:
        assert [each.getsockname()[0] for each in sockets] == ["127.0.0.1"]
    monkeypatch.setattr(socket, "getaddrinfo", name_of("192.0.2.1"))
    with pytest.raises(OSError, match="assign requested address"), listening("elsewhere", 0):
        pass
