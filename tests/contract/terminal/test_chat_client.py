"""`rootstock chat` on a scripted screen, over a real socket, against this daemon and others."""

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import StringIO

import pytest
from rich.console import Console

from engine.api import QueueFull
from server.settings import Settings
from server.terminal.chat import Conversation, Session, Turn
from server.terminal.chat_screen import Screen
from server.terminal.client import ChatClient, Endpoint, chat_client
from server.terminal.console import TerminalError
from tests.contract.canned_server import canned
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine, Gate, Script
from tests.contract.terminal.commands import ANSWER
from tests.polling import WAIT_SECONDS


class Chat:
    """A session, and a user who types what `say` is given and then ends the input."""

    def __init__(self, client: ChatClient, shown: StringIO) -> None:
        self._shown = shown
        self._typed: Iterator[str] = iter(())
        console = Console(file=shown, force_terminal=False)
        screen = Screen(self._read_line, console, console)
        self.session = Session(client, screen, Conversation())

    def say(self, *lines: str) -> str:
        """What the screen shows for these lines."""
        before = len(self._shown.getvalue())
        self._typed = iter(lines)
        self.session.run()
        return self._shown.getvalue()[before:]

    def _read_line(self) -> str:
        for line in self._typed:
            return line
        raise EOFError


@contextmanager
def chatting(url: str, shown: StringIO) -> Iterator[Chat]:
    with chat_client(Endpoint(url), None, {}) as client:
        yield Chat(client, shown)


@pytest.fixture
def chat(url: str, engine: FakeEngine) -> Iterator[Chat]:
    with chatting(url, StringIO()) as chat:
        yield chat


def prompt(engine: FakeEngine) -> str:
    """The next prompt that the engine has got."""
    return engine.tokenizer.decode(engine.submitted.get(timeout=WAIT_SECONDS).prompt)


def test_a_turn_is_the_answer_and_a_line_about_it(chat: Chat) -> None:
    answer, about = chat.say("What is shown?").splitlines()
    assert answer == ANSWER
    assert re.fullmatch(
        r"prompt 32 tokens \(\d+ cached\) · answer 14 tokens · \S+ tokens/s · first after \S+ s",
        about,
    )


def test_a_turn_has_the_one_before_it_cached(chat: Chat, engine: FakeEngine) -> None:
    _, first, _, second = chat.say("How much is cached?", "And now?").splitlines()
    prompt_tokens = int(first.split()[1])
    assert int(re.findall(r"(\d+) cached", second)[0]) >= prompt_tokens
    assert prompt(engine) == "<user>How much is cached?\n<assistant>"
    assert prompt(engine) == (
        f"<user>How much is cached?\n<assistant>{ANSWER}\n<user>And now?\n<assistant>"
    )


def test_system_and_clear(chat: Chat, engine: FakeEngine) -> None:
    chat.say("/system  Be brief. ", "One", "/clear", "Two", "/system", "/clear", "Three")
    assert prompt(engine) == "<system>Be brief.\n<user>One\n<assistant>"
    assert prompt(engine) == "<system>Be brief.\n<user>Two\n<assistant>"
    assert prompt(engine) == "<user>Three\n<assistant>"


def test_commands_and_empty_lines_ask_nothing(chat: Chat, engine: FakeEngine) -> None:
    shown = chat.say("", "   ", "/help", "/nope x", "/exit", "never read")
    assert "/system    set the system prompt" in shown
    assert "error: there is no /nope" in shown
    assert engine.submitted.empty()
    assert chat.session.failures == 0


def test_the_beginning_of_a_command_is_enough_where_it_is_the_only_one(
    chat: Chat, engine: FakeEngine
) -> None:
    shown = chat.say("/he", "/sys Be brief.", "One", "/", "/e", "never read")
    assert "/system    set the system prompt" in shown
    assert "`rootstock chat --resume` goes on with the last conversation" in shown
    assert "error: there is no /;" in shown
    assert prompt(engine) == "<system>Be brief.\n<user>One\n<assistant>"
    assert engine.submitted.empty()


def test_a_line_that_begins_with_a_space_is_no_command(chat: Chat, engine: FakeEngine) -> None:
    chat.say(" /help")
    assert prompt(engine) == "<user>/help\n<assistant>"


def test_a_turn_that_breaks_off_is_taken_back(chat: Chat, engine: FakeEngine) -> None:
    engine.script = Script(fails_after_tokens=3)
    assert chat.say("First").splitlines() == ["Hel", "error: it broke"]
    engine.script = Script()
    assert chat.say("Second").startswith(ANSWER)
    assert chat.session.conversation.turns == (Turn("Second", ANSWER),)
    assert chat.session.failures == 1


def test_a_turn_that_is_refused_is_taken_back(chat: Chat, engine: FakeEngine) -> None:
    engine.script = Script(refusal=QueueFull("no room", 3))
    (line,) = chat.say("First").splitlines()
    assert line.startswith("error: no room (HTTP 429 from http://127.0.0.1:")
    assert line.endswith("/v1/chat/completions)")
    assert chat.session.conversation == Conversation()


def test_a_server_that_is_gone_is_an_error_and_the_chat_goes_on() -> None:
    with ExitStack() as stack:
        with running(FakeEngine(), Settings(port=0)) as base_url:
            chat = stack.enter_context(chatting(f"{base_url}/v1", StringIO()))
            chat.say("First")
        lines = chat.say("Second", "Third").splitlines()
    netloc = base_url.removeprefix("http://")
    assert lines == [f"error: nothing listens at {netloc}: has the server been started?"] * 2
    assert chat.session.conversation.turns == (Turn("First", ANSWER),)


class CtrlC(StringIO):
    """A screen whose user presses Ctrl-C once, as soon as it shows what was awaited."""

    def __init__(self, awaited: str) -> None:
        super().__init__()
        self._awaited = [awaited]

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._awaited and self.getvalue().endswith(self._awaited[0]):
            self._awaited.clear()
            signal.raise_signal(signal.SIGINT)
        return written


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_stops_the_answer_and_keeps_what_came(url: str, engine: FakeEngine) -> None:
    gate = Gate()
    engine.script = Script(gate=gate, gate_after_tokens=5)
    with chatting(url, CtrlC("Hello")) as chat:
        shown = chat.say("First")
        assert engine.aborted.get(timeout=WAIT_SECONDS)
        gate.open()
        assert chat.say("Second").startswith(ANSWER)
    assert re.fullmatch(r"Hello\nfirst after \S+ s · stopped\n", shown)
    assert chat.session.conversation.turns == (Turn("First", "Hello"), Turn("Second", ANSWER))
    assert chat.session.failures == 0


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_before_the_first_token_takes_the_turn_back(chat: Chat, engine: FakeEngine) -> None:
    gate = Gate()
    engine.script = Script(gate=gate)

    def press() -> None:
        engine.at_gate.get(timeout=WAIT_SECONDS)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    user = threading.Thread(target=press)
    user.start()
    assert chat.say("First").split() == ["stopped"]
    user.join()
    assert engine.aborted.get(timeout=WAIT_SECONDS)
    gate.open()
    assert chat.session.conversation == Conversation()


def test_ctrl_c_at_the_prompt_leaves(url: str, engine: FakeEngine) -> None:
    def press() -> str:
        raise KeyboardInterrupt

    console = Console(file=StringIO())
    with chat_client(Endpoint(url), None, {}) as client:
        Session(client, Screen(press, console, console), Conversation()).run()
    assert engine.submitted.empty()


def test_control_characters_and_markup_of_a_model_are_text(chat: Chat, engine: FakeEngine) -> None:
    engine.script = Script(answers=["\x1b[31mred\x07\r\x9b2J [bold]x[/bold]\t:smile:\n" + "y" * 99])
    first, second, _ = chat.say("First").splitlines()
    assert first == "[31mred2J [bold]x[/bold]\t:smile:"
    assert second == "y" * 99


def chunk(finish_reason: str | None = None, **delta: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


COUNTS = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}


def test_another_server_that_does_not_report_cached_tokens() -> None:
    events = [chunk(content="a\u2028"), chunk(content="b"), chunk("stop"), COUNTS, "[DONE]"]
    with canned(*events) as server, chatting(server.url, StringIO()) as chat:
        shown = chat.say("Hi")
    assert shown.startswith("a\u2028b\nprompt 9 tokens · answer 2 tokens · ")
    (body,) = server.requests
    assert body == {
        "model": "first",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_reasoning_is_shown_above_the_answer_and_not_sent_back() -> None:
    events = [
        chunk(reasoning_content="h"),
        chunk(reasoning_content="m"),
        chunk("stop", content="Y"),
    ]
    with canned(*events) as server, chatting(server.url, StringIO()) as chat:
        assert chat.say("Hi").splitlines()[:2] == ["hm", "Y"]
    assert chat.session.conversation.turns == (Turn("Hi", "Y"),)


@pytest.mark.parametrize(
    ("events", "line"),
    [
        ([chunk(content="a"), {"error": {"message": "no memory"}}], "error: no memory"),
        ([chunk(content="a")], "error: the stream ended before the answer did"),
        (["<html>"], "error: not a chunk of a chat completion: <html>"),
    ],
)
def test_another_servers_errors_in_mid_stream(events: list[object], line: str) -> None:
    with canned(*events) as server, chatting(server.url, StringIO()) as chat:
        assert chat.say("Hi").splitlines()[-1] == line
    assert chat.session.conversation == Conversation()


def _connect(endpoint: Endpoint) -> None:
    with chat_client(endpoint, None, {}):
        pass


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1", "some host:80", "ftp://host/v1", "http://", "http://[::1/v1"]
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(TerminalError, match="is not a URL"):
        _connect(Endpoint(url))


def test_a_url_without_a_path_means_v1_and_one_without_a_scheme_http(base_url: str) -> None:
    with chat_client(Endpoint(base_url), None, {}) as client:
        assert client.base_url == f"{base_url}/v1"
    for given in (base_url, f"{base_url}/v1"):
        with chat_client(Endpoint(given.removeprefix("http://")), None, {}) as client:
            assert client.base_url == f"{base_url}/v1"


def test_a_server_with_a_key() -> None:
    with running(FakeEngine(), Settings(port=0, api_key="secret")) as base_url:
        _connect(Endpoint(base_url, "secret"))
        with pytest.raises(TerminalError, match="HTTP 401"):
            _connect(Endpoint(base_url, "wrong"))
        with pytest.raises(TerminalError, match="printable ASCII"):
            _connect(Endpoint(base_url, "schlüssel"))
