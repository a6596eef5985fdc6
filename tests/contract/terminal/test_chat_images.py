"""Images in `rootstock chat`."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from engine.api import InvalidImage
from server.settings import Settings
from server.terminal.chat import Conversation, Session, save, saved_conversation
from server.terminal.chat_screen import Screen
from server.terminal.client import Endpoint, chat_client
from server.terminal.console import TerminalError
from tests.contract.canned_server import canned
from tests.contract.daemon import running
from tests.contract.fake_engine import CARD, IMAGE, SEEING, FakeEngine, Script
from tests.contract.terminal.commands import ANSWER, read_until, terminal
from tests.polling import WAIT_SECONDS

PROMPT = b"\x1b[?2004h"  # a line is edited


class Chat:
    """A user of a session, who types lines."""

    def __init__(self, url: str, conversation: Conversation) -> None:
        self._url = url
        self.conversation = conversation
        self.failures = 0

    def say(self, *lines: str | Callable[[], str]) -> list[str]:
        """The lines of the screen, without those about tokens."""
        shown, typed = StringIO(), iter(lines)
        console = Console(file=shown, force_terminal=False, width=1000)

        def read() -> str:
            for line in typed:
                return line() if callable(line) else line
            raise EOFError

        with chat_client(Endpoint(self._url), None, {}) as client:
            session = Session(client, Screen(read, console, console), self.conversation, save)
            session.run()
        self.conversation, self.failures = session.conversation, session.failures
        return [line for line in shown.getvalue().splitlines() if " tokens · " not in line]


@contextmanager
def chatting(engine: FakeEngine) -> Iterator[Chat]:
    with running(engine, Settings(port=0)) as base_url:
        yield Chat(f"{base_url}/v1", Conversation())


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def seeing() -> FakeEngine:
    return FakeEngine(card=SEEING)


@pytest.fixture
def chat(seeing: FakeEngine) -> Iterator[Chat]:
    with chatting(seeing) as chat:
        yield chat


@pytest.fixture
def cat(tmp_path: Path) -> Path:
    file = tmp_path / "the cat.gif"
    file.write_bytes(IMAGE + b"cat")
    return file


def prompt(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.submitted.get(timeout=WAIT_SECONDS).prompt)


CAT = "[\0\0\0]"


def test_images_go_with_the_next_question_and_stay_at_their_place(
    chat: Chat, seeing: FakeEngine, cat: Path
) -> None:
    shown = chat.say(f"/image {cat}", f"/im '{cat}'", "Which?", "And now?")
    attached = "the cat.gif, 9 bytes, goes with the next question"
    assert shown == [attached, attached, ANSWER, ANSWER]
    first = f"<user>{CAT}{CAT}Which?\n<assistant>"
    assert prompt(seeing) == first
    assert prompt(seeing) == f"{first}{ANSWER}\n<user>And now?\n<assistant>"


def test_attached_images_are_dropped(chat: Chat, seeing: FakeEngine, cat: Path) -> None:
    chat.say(f"/image {cat}", "/image", "One", "/clear", f"/image {cat}", "/clear", "Two")
    assert prompt(seeing) == "<user>One\n<assistant>"
    assert prompt(seeing) == "<user>Two\n<assistant>"


def test_images_of_a_question_that_fails_stay_attached(
    chat: Chat, seeing: FakeEngine, cat: Path
) -> None:
    def mend() -> str:
        seeing.script = Script()
        return "/help"

    seeing.script = Script(image_refusal=InvalidImage("the image has too many pixels"))
    shown = chat.say(f"/image {cat}", "One", mend, "Two")
    assert "too many pixels" in shown[1]
    assert shown[2] == "1 image still attached; /image without a path drops them"
    assert (chat.failures, len(chat.conversation.turns)) == (1, 1)
    assert prompt(seeing) == f"<user>{CAT}Two\n<assistant>"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("none.png", None, "cannot read {} (No such file or directory)"),
        ("x" * 300, None, "cannot read {} (File name too long)"),
        ("text.png", b"text", "{} is not a PNG, JPEG, GIF or WebP image"),
        ("empty.png", b"", "{} is not a PNG, JPEG, GIF or WebP image"),
        ("large.gif", IMAGE + bytes(20 << 20), "{} is larger than 20.00 MiB"),
        ("", None, "{} is not a file"),
    ],
)
def test_files_that_are_not_sent(
    chat: Chat, seeing: FakeEngine, tmp_path: Path, name: str, content: bytes | None, problem: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    shown = chat.say(f"/image {path}", "Hi")
    assert shown == [f"error: {problem.format(path)}", ANSWER]
    assert chat.failures == 1
    assert prompt(seeing) == "<user>Hi\n<assistant>"


def test_a_pipe_is_not_read(chat: Chat, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    assert chat.say(f"/image {pipe}") == [f"error: {pipe} is not a file"]


@pytest.mark.parametrize(
    ("reason", "told"), [("", ""), ("its tower is unknown", ": its tower is unknown")]
)
def test_a_model_without_images(cat: Path, reason: str, told: str) -> None:
    with chatting(FakeEngine(card=replace(CARD, images_refused=reason))) as chat:
        (shown,) = chat.say(f"/image {cat}")
    assert shown.endswith(f" takes no images{told}")


def test_another_server_gets_a_data_url_of_the_files_media_type(tmp_path: Path) -> None:
    beginnings = {
        "png": b"\x89PNG\r\n\x1a\n",
        "jpeg": b"\xff\xd8\xff",
        "webp": b"RIFF\n\0\r\nWEBP",
        "gif": b"GIF87a",
    }
    lines = []
    for number, data in enumerate(beginnings.values()):
        (file := tmp_path / f"{number}.bmp").write_bytes(data)
        lines.append(f"/image {file}")
    with canned("[DONE]") as server:
        Chat(server.url, Conversation()).say(*lines, "Which?")
    (body,) = server.requests
    *images, text = body["messages"][0]["content"]
    heads = [image["image_url"]["url"].partition(";base64,")[0] for image in images]
    assert heads == [f"data:image/{kind}" for kind in beginnings]
    assert text == {"type": "text", "text": "Which?"}


def test_a_saved_conversation_has_its_images_in_their_files(
    chat: Chat, seeing: FakeEngine, tmp_path: Path
) -> None:
    (image := tmp_path / "image.gif").write_bytes(IMAGE + bytes(range(99)))
    chat.say(f"/image {image}", "Which?")
    (saved,) = (tmp_path / "state").rglob("conversation.json")
    assert "base64" not in saved.read_text()
    chat.conversation = saved_conversation()
    chat.say("And now?")
    assert prompt(seeing) in prompt(seeing)
    image.write_bytes(IMAGE)
    with pytest.raises(TerminalError, match=rf"saved conversation has changed: {image}"):
        saved_conversation()
    image.unlink()
    with pytest.raises(TerminalError, match=rf"conversation is gone: cannot read {image} \(No"):
        saved_conversation()


@pytest.mark.process
def test_the_names_of_files_are_completed(seeing: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "picture.gif").write_bytes(IMAGE)
    with (
        running(seeing, Settings(port=0)) as base_url,
        terminal(tmp_path, "chat", "--url", f"{base_url}/v1") as (_, screen),
    ):
        read_until(screen, PROMPT)
        os.write(screen, f"/image {tmp_path}/pict".encode())
        read_until(screen, b"picture.gif")
        os.write(screen, b"\t\r")
        assert b"goes with the next question" in read_until(screen, PROMPT)
