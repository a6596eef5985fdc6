"""`rootstock chat` and the daemon that runs already on the configured port."""

import socket
from collections.abc import Iterator

import pytest

from server.chat.client import Endpoint
from server.chat.events import KeyRefused
from server.chat.running import endpoint_at, running_daemon
from server.settings import Settings
from tests.contract.canned_server import canned
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine
from tests.contract.test_chat_command import ANSWER, piped


def port_of(base_url: str) -> int:
    return int(base_url.rpartition(":")[2])


@pytest.fixture
def keyed_port() -> Iterator[int]:
    """Of a daemon that asks for the key `k`."""
    with running(FakeEngine(), Settings(port=0, api_key="k")) as base_url:
        yield port_of(base_url)


def test_the_chat_joins_the_daemon_that_runs(base_url: str, engine: FakeEngine) -> None:
    result = piped("hello\n", ROOTSTOCK_PORT=str(port_of(base_url)))
    assert result.stdout == f"{ANSWER}\n"
    assert f"at {base_url}/v1" in result.stderr
    assert engine.submitted.qsize() == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_it_is_found_wherever_this_machine_reaches_it(host: str, keyed_port: int) -> None:
    settings = Settings(host=host, port=keyed_port, api_key="k")
    found = running_daemon(settings, model=None)
    reached = "127.0.0.1" if host == "0.0.0.0" else host
    assert found == Endpoint(f"http://{reached}:{keyed_port}/v1", "k")


def test_a_model_that_is_named_must_be_the_one_it_serves(base_url: str, model: str) -> None:
    settings = Settings(port=port_of(base_url))
    assert running_daemon(settings, model) is not None
    assert running_daemon(settings, "another/model") is None


def test_a_daemon_with_another_key_is_no_reason_to_load_the_model_twice(keyed_port: int) -> None:
    with pytest.raises(KeyRefused, match=r"^HTTP 401 from http://127\.0\.0\.1:"):
        running_daemon(Settings(port=keyed_port), model=None)
    result = piped("hello\n", ROOTSTOCK_PORT=str(keyed_port))
    assert result.stderr.startswith("error: HTTP 401")
    assert result.exit_code == 1


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert running_daemon(Settings(port=port), model=None) is None
    assert running_daemon(Settings(port=0), model=None) is None


def test_something_else_there() -> None:
    with canned(status=404) as server:
        assert running_daemon(Settings(port=server.server_address[1]), model=None) is None


def test_no_other_host_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a daemon's own address, and may be another machine's: it would get the key."""
    monkeypatch.setattr("server.chat.running.served_models", lambda endpoint: ["a model"])
    settings = Settings(host="192.0.2.1", port=8000, api_key="k")
    assert running_daemon(settings, model=None) is None


@pytest.mark.parametrize(
    ("url", "given", "sent"),
    [
        ("http://127.0.0.1:8000/v1", "", "k"),
        ("http://localhost:8000/v1", "", "k"),
        ("http://[::1]:8000/v1", "", "k"),
        ("http://127.0.0.1:8000/v1", "other", "other"),
        ("https://example.org/v1", "", ""),
        ("https://example.org/v1", "other", "other"),
        ("https://127.0.0.1@example.org/v1", "", ""),
        ("https://127.0.0.1.example.org/v1", "", ""),
        ("http://192.0.2.1:8000/v1", "", ""),
        ("http://[", "", ""),
    ],
)
def test_the_daemons_own_key_is_for_this_machine(url: str, given: str, sent: str) -> None:
    assert endpoint_at(url, given, Settings(api_key="k")) == Endpoint(url, sent)
