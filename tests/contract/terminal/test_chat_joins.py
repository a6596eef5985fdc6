"""`rootstock chat` and the daemon that runs already on the configured port."""

import socket
from collections.abc import Iterator

import pytest

from server.settings import Settings
from server.terminal.client import Endpoint, served_models
from server.terminal.console import KeyRefused, TerminalError
from server.terminal.endpoint import endpoint_at, running_daemon
from tests.contract.canned_server import canned
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine
from tests.contract.terminal.commands import ANSWER
from tests.contract.terminal.test_chat_command import piped


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
    with pytest.raises(KeyRefused, match=r"\(HTTP 401 from http://127\.0\.0\.1:"):
        running_daemon(Settings(port=keyed_port), model=None)
    result = piped("hello\n", ROOTSTOCK_PORT=str(keyed_port))
    needed = "error: A valid API key is needed: --api-key KEY, or ROOTSTOCK_CLIENT_API_KEY"
    assert result.stderr.startswith(needed)
    assert result.exit_code == 1
    given = piped("hello\n", ROOTSTOCK_PORT=str(keyed_port), ROOTSTOCK_CLIENT_API_KEY="k")
    assert given.exit_code == 0


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
    monkeypatch.setattr("server.terminal.endpoint.served_models", lambda endpoint: ["a model"])
    settings = Settings(host="192.0.2.1", port=8000, api_key="k")
    assert running_daemon(settings, model=None) is None


@pytest.mark.parametrize(
    ("url", "given", "sent"),
    [
        ("http://127.0.0.1:8000/v1", "", "k"),
        ("http://127.0.0.1:8000", "", "k"),
        ("http://127.0.0.1:8000/v1", "other", "other"),
        ("http://127.0.0.1:8001/v1", "", ""),
        ("http://127.0.0.1/v1", "", ""),
        ("https://127.0.0.1:8000/v1", "", ""),
        ("http://localhost:8000/v1", "", ""),  # which may be [::1]
        ("http://[::1]:8000/v1", "", ""),
        ("https://example.org/v1", "", ""),
        ("https://example.org/v1", "other", "other"),
        ("http://127.0.0.1:8000@example.org/v1", "", ""),
        ("https://127.0.0.1.example.org/v1", "", ""),
        ("http://192.0.2.1:8000/v1", "", ""),
        ("http://[", "", ""),
    ],
)
def test_the_daemons_own_key_is_for_its_own_address(url: str, given: str, sent: str) -> None:
    assert endpoint_at(url, given, Settings(api_key="k")) == Endpoint(url, sent)


@pytest.mark.parametrize(
    ("host", "port", "url", "sent"),
    [
        ("localhost", 8000, "http://localhost:8000/v1", "k"),
        ("0.0.0.0", 9000, "http://127.0.0.1:9000/v1", "k"),
        ("::", 80, "http://[::1]/v1", "k"),
        ("192.0.2.1", 8000, "http://192.0.2.1:8000/v1", ""),  # may be another machine's
        ("127.0.0.1", 0, "http://127.0.0.1:8000/v1", ""),
    ],
)
def test_its_own_address_is_what_the_settings_say(
    host: str, port: int, url: str, sent: str
) -> None:
    settings = Settings(host=host, port=port, api_key="k")
    assert endpoint_at(url, "", settings) == Endpoint(url, sent)


def test_a_redirect_takes_the_key_nowhere() -> None:
    with canned() as elsewhere, canned(status=307, Location=f"{elsewhere.url}/models") as server:
        with pytest.raises(TerminalError, match=r"\(HTTP 307 from "):
            served_models(Endpoint(server.url, "k"))
        assert (server.keys, elsewhere.keys) == (["Bearer k"], [])
