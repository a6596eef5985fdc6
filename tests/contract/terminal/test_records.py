"""Daemons that commands find by their records, wherever they listen."""

import json
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from server.settings import Settings
from server.terminal.client import Endpoint
from server.terminal.console import TerminalError
from server.terminal.endpoint import endpoint_at, endpoint_of, running_daemon
from server.terminal.records import recorded, records_folder, running_records
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine
from tests.contract.terminal.commands import ANSWER, run


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No records, and no daemon at the address of the settings."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("server.terminal.endpoint._own", lambda settings: None)


@contextmanager
def daemon(*names: str, api_key: str | None = None) -> Iterator[str]:
    """The URL of a daemon with a record, and a free port."""
    settings = Settings(port=0, served_model_name=names, api_key=api_key)
    with running(FakeEngine(), settings) as base_url, recorded(f"{base_url}/v1", names):
        yield f"{base_url}/v1"


def test_a_record_says_where_the_daemon_is_and_only_its_user_reads_it() -> None:
    with recorded("http://127.0.0.1:9000/v1", ["tiny", "tiny:sql"]):
        (path,) = records_folder().iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert {*json.loads(path.read_text())} == {"pid", "machine", "url", "models"}
        (record,) = running_records()
        assert record.text == "http://127.0.0.1:9000/v1 (tiny, tiny:sql)"
    assert [*records_folder().iterdir()] == []


KILLED = """
import os, signal
from server.terminal.records import recorded
with recorded("http://127.0.0.1:9000/v1", ["tiny"]):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_record_of_a_daemon_that_was_killed_is_removed() -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [*records_folder().iterdir()]
    assert running_records() == []
    assert [*records_folder().iterdir()] == []


def test_a_record_of_another_machine_that_shares_the_home_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with recorded("http://127.0.0.1:9000/v1", ["tiny"]):
        monkeypatch.setattr("platform.node", lambda: "another")
        assert running_records() == []
        assert [*records_folder().iterdir()]


def test_files_that_are_no_records_are_passed_over() -> None:
    with recorded("http://127.0.0.1:9000/v1", ["tiny"]):
        (path,) = records_folder().iterdir()
        path.write_text("{")
        assert running_records() == []


def test_a_daemon_on_another_port_is_found() -> None:
    with daemon("tiny") as url:
        assert f"daemon    {url}" in run("ps").stdout
        assert run("chat", typed="hello\n").stdout == f"{ANSWER}\n"
        assert f"tiny at {url}" in run("top").stdout
        assert url.removesuffix("/v1") in run("launch", "claude", "--print", "--force").stdout


def test_of_several_one_has_to_be_chosen() -> None:
    with daemon("tiny") as tiny, daemon("small") as small:
        urls = sorted([f"{tiny} (tiny)", f"{small} (small)"])
        for command in (["ps"], ["chat"], ["top"], ["launch", "claude", "--print"]):
            result = run(*command)
            assert result.exit_code == 1
            assert result.stderr == (
                f"error: several daemons run; choose one with --url: {'; '.join(urls)}\n"
            )
        assert f"others    {small} (small)" in run("ps", "--url", tiny).stdout
        by_model = run("chat", "--model", "small", typed="hello\n")
        assert f"small at {small}" in by_model.stderr
        assert f"small at {small}" in run("top", "--model", "small").stdout
        launched = run("launch", "claude", "--model", "small", "--print", "--force")
        assert small.removesuffix("/v1") in launched.stdout


def test_the_settings_key_is_for_ones_own_daemons() -> None:
    settings = Settings(api_key="k")
    with daemon("tiny", api_key="k") as url:
        assert endpoint_of(None, "", settings) == Endpoint(url, "k")
        assert endpoint_at(url, "", settings) == Endpoint(url, "k")
        assert endpoint_at(url, "other", settings) == Endpoint(url, "other")
    assert endpoint_at(url, "", settings) == Endpoint(url, "")


def test_a_port_that_is_set_is_the_only_one() -> None:
    with daemon("tiny") as url:
        settings = Settings(port=1)
        assert running_daemon(settings, None) is None
        with pytest.raises(
            TerminalError, match=f"no daemon runs; --url names one that does: {url}"
        ):
            endpoint_of(None, "", settings)
        assert running_daemon(Settings(port=0), None) == Endpoint(url)


def test_the_daemon_of_the_settings_goes_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as daemons:
        own, other, _ = (daemons.enter_context(daemon(name)) for name in ("one", "two", "three"))
        monkeypatch.setattr("server.terminal.endpoint._own", lambda settings: own)
        assert running_daemon(Settings(), None) == Endpoint(own)
        assert running_daemon(Settings(), "two") == Endpoint(other)
        assert running_daemon(Settings(), "four") is None


def test_a_port_that_another_daemon_has(caplog: pytest.LogCaptureFixture) -> None:
    with daemon("tiny") as url:
        port = url.removesuffix("/v1").rpartition(":")[2]
        (record,) = running_records()
        assert run("serve", "--port", port, "--model", "/no/such/model").exit_code == 1
    (message,) = caplog.messages
    assert message.startswith(
        f"port {port} is taken by a Rootstock (pid {record.pid}) at {url} (tiny): use that one, or "
        "start this one with --port "
    )
