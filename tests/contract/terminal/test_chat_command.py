"""`rootstock chat` as a whole: in a pipe, at a terminal, and with a daemon of its own."""

import os
import signal
import stat
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import Result

from engine.api import QueueFull
from server.settings import Settings
from server.terminal.client import Endpoint
from server.terminal.console import TerminalError
from server.terminal.local_daemon import STOP_SECONDS, local_daemon
from server.terminal.records import running_records
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine, Gate, Script
from tests.contract.terminal.commands import ANSWER, read_until, run, terminal
from tests.polling import WAIT_SECONDS, until

pytestmark = pytest.mark.process

PROMPT = b"\x1b[?2004h"  # turns bracketed paste on, while a line is edited


def piped(text: str, *arguments: str, **environment: str) -> Result:
    return run("chat", *arguments, typed=text, **environment)


def test_a_pipe_gets_the_answers_alone_on_standard_output(url: str) -> None:
    result = piped("hello\nagain\n", "--url", url)
    assert result.stdout == f"{ANSWER}\n{ANSWER}\n"
    assert " cached) · answer 14 tokens" in result.stderr
    assert "\x1b" not in result.output
    assert result.exit_code == 0


def test_a_pipe_in_which_an_answer_fails_says_so_at_the_end(url: str, engine: FakeEngine) -> None:
    engine.script = Script(refusal=QueueFull("no room", 3))
    result = piped("hello\nagain\n", "--url", url)
    assert result.stdout == ""
    assert result.stderr.count("no room") == 2
    assert result.exit_code == 1


def test_only_what_is_given_is_sent(url: str, engine: FakeEngine) -> None:
    piped("hello\n", "--url", url, "--system", "Be brief.", "--max-tokens", "3", "--seed", "7")
    piped("hello\n", "--url", url, "--temperature", "0.25", "--top-p", "0.5")
    plain, drawn = (engine.submitted.get(timeout=WAIT_SECONDS) for _ in range(2))
    assert engine.tokenizer.decode(plain.prompt).startswith("<system>Be brief.\n<user>hello")
    assert (plain.max_tokens, plain.sampling.seed) == (3, 7)
    assert (plain.sampling.temperature, plain.sampling.top_p) == (1.0, 1.0)
    assert (drawn.sampling.temperature, drawn.sampling.top_p) == (0.25, 0.5)


def test_a_model_that_is_not_served(url: str) -> None:
    result = piped("hello\n", "--url", url, "--model", "other")
    error = result.stderr.splitlines()[-1]
    assert error.startswith("error: The model 'other' does not exist")
    assert result.exit_code == 1


def test_the_key_may_come_from_the_environment() -> None:
    with running(FakeEngine(), Settings(port=0, api_key="secret")) as base_url:
        port = base_url.rpartition(":")[2]
        ours = {"ROOTSTOCK_PORT": port, "ROOTSTOCK_API_KEY": "secret"}
        assert piped("", "--url", base_url, **ours).exit_code == 0
        assert piped("", "--url", base_url, ROOTSTOCK_CLIENT_API_KEY="secret").exit_code == 0
        assert piped("", "--url", base_url, ROOTSTOCK_API_KEY="secret").exit_code == 1


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_at_a_terminal_stops_the_answer_and_ctrl_d_leaves(
    url: str, engine: FakeEngine, tmp_path: Path
) -> None:
    gate = Gate()
    engine.script = Script(gate=gate, gate_after_tokens=5)
    with terminal(tmp_path, "chat", "--url", url) as (process, screen):
        read_until(screen, PROMPT)
        os.write(screen, b"hi\r")
        read_until(screen, b"Hello")
        process.send_signal(signal.SIGINT)
        assert engine.aborted.get(timeout=WAIT_SECONDS)
        gate.open()
        assert b"stopped" in read_until(screen, PROMPT)
        os.write(screen, b"\x04")
        assert process.wait(WAIT_SECONDS) == 0


def test_sigterm_ends_a_chat_in_the_middle_of_an_answer(
    url: str, engine: FakeEngine, tmp_path: Path
) -> None:
    gate = Gate()
    engine.script = Script(gate=gate, gate_after_tokens=5)
    with terminal(tmp_path, "chat", "--url", url) as (process, screen):
        read_until(screen, PROMPT)
        os.write(screen, b"hi\r")
        read_until(screen, b"Hello")
        process.terminate()
        assert process.wait(WAIT_SECONDS) == 128 + signal.SIGTERM
    assert engine.aborted.get(timeout=WAIT_SECONDS)
    gate.open()


def test_sigterm_at_the_prompt_leaves_the_terminal_as_it_was(url: str, tmp_path: Path) -> None:
    with terminal(tmp_path, "chat", "--url", url) as (process, screen):
        read_until(screen, PROMPT)
        os.write(screen, b"half a line")
        read_until(screen, b"line")
        assert not termios.tcgetattr(screen)[3] & termios.ECHO
        process.terminate()
        assert process.wait(WAIT_SECONDS) == 128 + signal.SIGTERM
        assert termios.tcgetattr(screen)[3] & termios.ECHO


def test_ctrl_z_at_the_prompt_suspends_the_chat(url: str, tmp_path: Path) -> None:
    with terminal(tmp_path, "chat", "--url", url) as (process, screen):
        read_until(screen, PROMPT)
        os.write(screen, b"half")
        read_until(screen, b"half")
        os.write(screen, b"\x1a")
        until(lambda: os.waitpid(process.pid, os.WUNTRACED | os.WNOHANG)[1], os.WIFSTOPPED)
        process.send_signal(signal.SIGCONT)
        read_until(screen, PROMPT)
        os.write(screen, b" a line\r")
        read_until(screen, ANSWER.encode())


def test_a_paste_is_one_question_and_what_was_typed_is_found_again(
    url: str, engine: FakeEngine, tmp_path: Path
) -> None:
    with terminal(tmp_path, "chat", "--url", url) as (_, screen):
        for line in (b"the first", b"\x1b[200~one\rtwo\x1b[201~"):
            read_until(screen, PROMPT)
            os.write(screen, line + b"\r")
        read_until(screen, PROMPT)
    assert "+one\n+two\n" in (tmp_path / "rootstock" / "chat_history").read_text()
    with terminal(tmp_path, "chat", "--url", url) as (_, screen):
        read_until(screen, PROMPT)
        os.write(screen, b"\x12fir")
        read_until(screen, b"the ")  # the rest of it is in bold
        os.write(screen, b"\r\r")
        read_until(screen, PROMPT)
    asked = [engine.submitted.get(timeout=WAIT_SECONDS).prompt for _ in range(3)]
    assert engine.tokenizer.decode(asked[1]).endswith("<user>one\ntwo\n<assistant>")
    assert engine.tokenizer.decode(asked[2]) == "<user>the first\n<assistant>"


def test_a_conversation_is_resumed_and_is_for_its_user_alone(
    url: str, engine: FakeEngine, tmp_path: Path
) -> None:
    with terminal(tmp_path, "chat", "--url", url, "--system", "Be brief.") as (_, screen):
        read_until(screen, PROMPT)
        os.write(screen, b"first\r")
        read_until(screen, PROMPT)
        os.write(screen, b"\x04")
        read_until(screen, b"`rootstock chat --resume` goes on; saved in ")
    file = tmp_path / "rootstock" / "conversation.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    state = {"XDG_STATE_HOME": str(tmp_path)}
    resumed = piped("second\n", "--url", url, "--resume", **state)
    assert f"going on after 1 turn, saved in {file}\n" in resumed.stderr
    asked = [engine.submitted.get(timeout=WAIT_SECONDS).prompt for _ in range(2)]
    assert engine.tokenizer.decode(asked[1]) == (
        f"<system>Be brief.\n<user>first\n<assistant>{ANSWER}\n<user>second\n<assistant>"
    )
    piped("another\n", "--url", url, **state)  # a pipe replaces nothing
    assert "after 2 turns" in piped("", "--url", url, "--resume", **state).stderr


def test_without_a_saved_conversation_none_is_resumed(url: str, tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}
    file = tmp_path / "rootstock" / "conversation.json"
    result = piped("", "--url", url, "--resume", **state)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: no conversation is saved in {file} (No such file")
    file.parent.mkdir()
    file.write_text("[]")
    result = piped("", "--url", url, "--resume", **state)
    assert result.stderr == f"error: {file} is no saved conversation\n"


def test_commands_are_completed(url: str, tmp_path: Path) -> None:
    with terminal(tmp_path, "chat", "--url", url) as (_, screen):
        read_until(screen, PROMPT)
        os.write(screen, b"/sy")
        read_until(screen, b"/system")  # offered, but not typed yet
        os.write(screen, b"\t Be brief.\r")
        assert b"system prompt set" in read_until(screen, PROMPT)
        os.write(screen, b"/he\t\r")
        assert b"forget the conversation" in read_until(screen, PROMPT)


def ignore(line: str) -> None:
    """Progress that nobody watches."""


def test_a_daemon_of_its_own_is_private_and_ends_with_the_chat() -> None:
    """Its gate is open: what it reads from is empty."""
    with local_daemon([sys.executable, "-m", "tests.contract.gated_daemon"], ignore) as endpoint:
        models = f"{endpoint.base_url}/models"
        key = {"Authorization": f"Bearer {endpoint.api_key}"}
        assert httpx.get(models, headers=key, trust_env=False).status_code == 200
        assert httpx.get(models, trust_env=False).status_code == 401
    with pytest.raises(httpx.ConnectError):
        httpx.get(models, trust_env=False)


RECORDED = """
import signal, sys
from server.terminal.records import recorded
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
with recorded("http://127.0.0.1:1/v1", ["tiny"]):
    print("ready on http://127.0.0.1:1/v1", flush=True)
    signal.pause()
"""


def test_a_daemon_of_its_own_is_not_found_by_other_commands() -> None:
    with local_daemon([sys.executable, "-c", RECORDED], ignore) as endpoint:
        assert endpoint.base_url == "http://127.0.0.1:1/v1"
        assert running_records() == []


READY = """
import os, signal
signal.signal(signal.SIGTERM, {})
print("ready on http://127.0.0.1:1/v1", flush=True)
signal.pause()
"""
NEVER_READY = "print('one'); print('two'); raise SystemExit(3)"


@pytest.mark.parametrize(
    ("program", "stop_seconds", "problem"),
    [
        (NEVER_READY, STOP_SECONDS, r"^the daemon that this chat started exited with 3\none\ntwo$"),
        (READY.format("lambda *_: os._exit(3)"), STOP_SECONDS, "exited with 3"),
        (READY.format("signal.SIG_IGN"), 0.0, r"exited with -9\n"),
    ],
    ids=["it does not start", "it ends badly", "it does not end, and is killed"],
)
def test_how_a_daemon_of_its_own_ended_is_said(
    program: str, stop_seconds: float, problem: str
) -> None:
    with (
        pytest.raises(TerminalError, match=problem),
        local_daemon([sys.executable, "-c", program], ignore, stop_seconds),
    ):
        pass


def test_a_daemon_may_write_its_cache_to_disk_before_it_is_killed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    @contextmanager
    def recorded(
        command: list[str], progress: Callable[[str], None], stop_seconds: float
    ) -> Iterator[Endpoint]:
        given.append(stop_seconds)
        yield Endpoint(url)

    monkeypatch.setattr("server.terminal.chat.local_daemon", recorded)
    monkeypatch.setenv("ROOTSTOCK_PORT", "0")  # where no daemon runs
    monkeypatch.setenv("ROOTSTOCK_DISK_CACHE_SHUTDOWN_SECONDS", "600")
    assert piped("").exit_code == 0
    assert given == [STOP_SECONDS + 600]


def test_a_model_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon is this one, also where the working directory has a `server` of its own."""
    (tmp_path / "server.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    result = piped("hello\n", "--model", "/no/such/model")
    begun = "no daemon runs that serves /no/such/model; starting one for this chat\n"
    ended = f"{begun}error: the daemon that this chat started exited with 1\n"
    assert result.stderr.startswith(ended)
    problem = "cannot load /no/such/model: there is no directory /no/such/model"
    assert result.stderr.removeprefix(ended).count(problem) == 1
    assert result.exit_code == 1
