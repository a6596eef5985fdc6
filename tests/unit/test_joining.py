"""Ranks of other machines join rank 0, and leave no process when either end is lost."""

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from engine.api import ModelError
from engine.process import handshake, joining
from engine.process.handshake import HandshakeError, Role, shake_hands
from engine.process.joining import Address, Ended, await_ranks, join, join_for_ever
from tests.polling import until

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
PATIENCE = 60.0


def free_address() -> Address:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return Address(*listener.getsockname())


def connected(address: Address) -> socket.socket:
    """A connection to rank 0, as soon as that listens."""
    found = list[socket.socket]()

    def connect() -> bool:
        try:
            found.append(socket.create_connection(address))
        except ConnectionRefusedError:
            return False
        return True

    until(connect)
    return found[0]


def joined(address: Address, key: bytes = KEY) -> socket.socket:
    connection = connected(address)
    try:
        shake_hands(connection, key, Role.JOINER)
    except HandshakeError:
        connection.close()
        raise
    return connection


@contextmanager
def awaiting(
    address: Address, n_ranks: int
) -> Iterator[tuple["Future[list[socket.socket]]", list[str]]]:
    """Rank 0 that listens, and its reports."""
    reports = list[str]()
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(await_ranks, address, KEY, n_ranks, reports.append), reports


def same_connection(ours: socket.socket, theirs: socket.socket) -> bool:
    """Whether these are the two ends of one connection."""
    ours.sendall(b"!")
    theirs.settimeout(0.5)
    try:
        return theirs.recv(1) == b"!"
    except TimeoutError:
        return False


def test_ranks_are_numbered_as_they_join_and_strangers_are_refused() -> None:
    address = free_address()
    with awaiting(address, 3) as (future, reports), connected(address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        with joined(address) as first:
            until(lambda: len(reports) == 2)
            with pytest.raises(HandshakeError, match="another key"):
                joined(address, OTHER_KEY)
            with joined(address) as second:
                to_first, to_second = future.result(PATIENCE)
                with to_first, to_second:
                    assert same_connection(first, to_first)
                    assert same_connection(second, to_second)
    assert reports == [
        f"ranks 1 and 2 have not joined: waiting for them at {address}",
        f"rank 2 has not joined: waiting for it at {address}",
    ]


def test_a_rank_that_leaves_while_others_are_awaited_is_awaited_again() -> None:
    address = free_address()
    with awaiting(address, 3) as (future, reports):
        with joined(address):
            until(lambda: len(reports) == 2)
        until(lambda: len(reports) == 3)
        assert reports[2] == reports[0]
        with joined(address), joined(address):
            for connection in future.result(PATIENCE):
                connection.close()


def test_strangers_that_send_nothing_keep_no_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.5)
    address = free_address()
    with awaiting(address, 2) as (future, _):
        strangers = [connected(address) for _ in range(2 * joining._HANDSHAKES_AT_ONCE)]
        accepted = list[socket.socket]()

        def is_accepted() -> bool:
            with suppress(HandshakeError):
                accepted.append(joined(address))
            return bool(accepted)

        until(is_accepted)
        future.result(PATIENCE)[0].close()
        for each in strangers + accepted:
            each.close()


def test_an_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address(*listener.getsockname())
        with pytest.raises(ModelError, match=f"ranks_listen: cannot listen at {address}: "):
            await_ranks(address, KEY, 2, lambda line: None)


class Rank:
    """A rank whose process is a stub, and rank 0's end of the connection to it."""

    def __init__(self, behaviour: str) -> None:
        self.reports = list[str]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        address = Address(*self._listener.getsockname())
        self._thread = ThreadPoolExecutor(1)
        self.ended: Future[Ended] = self._thread.submit(
            join, behaviour, address, KEY, self.reports.append
        )
        self.rank_0, _ = self._listener.accept()
        shake_hands(self.rank_0, KEY, Role.LISTENER)

    def begin(self) -> int:
        """Have the process start. Returns its id, when it runs."""
        self.rank_0.sendall(b"setup")
        sent = b""
        while not sent.endswith(b" "):
            sent += self.rank_0.recv(100)
        return int(sent)

    def close(self) -> None:
        self.rank_0.close()
        self._listener.close()
        self._thread.shutdown()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Rank]]:
    monkeypatch.setattr(joining, "RANK_MODULE", "tests.unit.rank_stub")
    ranks = list[Rank]()

    def make(behaviour: str) -> Rank:
        ranks.append(Rank(behaviour))
        return ranks[-1]

    yield make
    for each in ranks:
        each.close()


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.process
def test_a_process_starts_when_all_have_joined_and_ends_with_rank_0(
    rank: Callable[[str], Rank],
) -> None:
    one = rank("computes")
    until(lambda: len(one.reports) == 1)
    pid = one.begin()
    until(lambda: len(one.reports) == 2)
    one.rank_0.close()
    assert one.ended.result(PATIENCE) == Ended("the rank's process has ended: exit status 7", True)
    assert has_ended(pid)


@pytest.mark.process
def test_a_stopped_process_is_killed_when_rank_0_has_ended(
    rank: Callable[[str], Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "END_SECONDS", 0.2)
    one = rank("stops")
    pid = one.begin()
    until(lambda: len(one.reports) == 2)
    one.rank_0.close()
    assert one.ended.result(PATIENCE) == Ended("the rank's process has ended: SIGKILL", True)
    assert has_ended(pid)


@pytest.mark.process
def test_rank_0_notices_at_once_that_a_process_has_failed(rank: Callable[[str], Rank]) -> None:
    one = rank("fails")
    one.begin()
    with suppress(ConnectionResetError):
        assert one.rank_0.recv(100) == b""
    assert not one.ended.result(PATIENCE).has_loaded


def test_rank_0_that_ends_before_all_have_joined_starts_no_process(
    rank: Callable[[str], Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rank("computes")
    monkeypatch.setattr(joining, "start_child", None)
    one.rank_0.close()
    assert one.ended.result(PATIENCE) == Ended("rank 0 has ended before all ranks had joined")


def test_a_rank_with_another_key_says_so(rank: Callable[[str], Rank]) -> None:
    address = free_address()
    with awaiting(address, 2) as (future, _):
        until(lambda: "another key" in join("", address, OTHER_KEY, lambda line: None).why)
        with joined(address):
            future.result(PATIENCE)[0].close()


def test_pauses_grow_until_the_model_has_been_loaded_and_a_reason_is_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unreachable, lost = Ended("no rank 0"), Ended("rank 0 is lost", has_loaded=True)
    attempts = iter([*[unreachable] * 6, lost, *[unreachable] * 2, lost, lost])
    monkeypatch.setattr(joining, "join", lambda *arguments: next(attempts))
    pauses, reports = list[float](), list[str]()
    with pytest.raises(StopIteration):
        join_for_ever("", Address("", 0), KEY, reports.append, pauses.append)
    assert pauses == [1, 2, 4, 8, 10, 10, 1, 2, 4, 1, 1]
    assert [report.split(";")[0] for report in reports] == [
        "no rank 0",
        "rank 0 is lost",
        "no rank 0",
        "rank 0 is lost",
        "rank 0 is lost",
    ]
