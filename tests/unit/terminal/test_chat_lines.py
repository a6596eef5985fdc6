"""The chat's line editor, on keys as a terminal sends them."""

import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from server.terminal.chat import COMMANDS
from server.terminal.chat_screen import MAX_HISTORY_BYTES, history_file, history_in, line_reader

ENTER, ALT_ENTER, CTRL_C, CTRL_D = "\r", "\x1b\r", "\x03", "\x04"

Typed = Callable[..., str]


@pytest.fixture
def typed() -> Iterator[Typed]:
    """What the editor gives for these keys."""
    with create_pipe_input() as keys, create_app_session(keys, DummyOutput()):

        def typed(text: str, history: History | None = None) -> str:
            keys.send_text(text)
            return line_reader(COMMANDS, history or InMemoryHistory())()

        yield typed


def test_enter_sends_and_alt_enter_breaks_the_line(typed: Typed) -> None:
    assert typed(f"one{ENTER}") == "one"
    assert typed(f"one{ALT_ENTER}two{ENTER}") == "one\ntwo"


def test_a_paste_is_one_text_whatever_its_line_breaks(typed: Typed) -> None:
    assert typed(f"see: \x1b[200~one\r\n/exit\rthree\x1b[201~{ENTER}") == "see: one\n/exit\nthree"


def test_ctrl_c_takes_back_what_is_typed_and_leaves_where_nothing_is(typed: Typed) -> None:
    assert typed(f"one{ALT_ENTER}two{CTRL_C}three{ENTER}") == "three"
    with pytest.raises(KeyboardInterrupt):
        typed(CTRL_C)


def test_ctrl_d_leaves_where_nothing_is_typed(typed: Typed) -> None:
    assert typed(f"one{CTRL_D}{ENTER}") == "one"
    with pytest.raises(EOFError):
        typed(CTRL_D)


def test_the_history_is_for_its_owner_alone(typed: Typed, tmp_path: Path) -> None:
    file = tmp_path / "state" / "rootstock" / "history"
    typed(f"one{ENTER}", history_in(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    file.chmod(0o644)
    typed(f"two{ENTER}", history_in(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(history_in(file).load_history_strings()) == ["two", "one"]


def test_a_history_that_cannot_be_kept_is_no_reason_not_to_chat(
    typed: Typed, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert typed(f"one{ENTER}", history_in(tmp_path / "file" / "history")) == "one"
    history = history_in(tmp_path / "history")
    (tmp_path / "history").unlink()
    (tmp_path / "history").mkdir()
    assert typed(f"one{ENTER}", history) == "one"


def test_a_large_history_is_put_aside(tmp_path: Path) -> None:
    file = tmp_path / "history"
    file.write_bytes(bytes(MAX_HISTORY_BYTES + 1))
    history_in(file)
    assert (file.stat().st_size, (tmp_path / "history.old").stat().st_size) == (
        0,
        MAX_HISTORY_BYTES + 1,
    )


@pytest.mark.parametrize(
    ("state", "file"),
    [
        ("/var/state", "/var/state/rootstock/chat_history"),
        ("", "/home/me/.local/state/rootstock/chat_history"),
        ("relative", "/home/me/.local/state/rootstock/chat_history"),
    ],
)
def test_where_the_history_lies(state: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_STATE_HOME", state)
    assert history_file() == Path(file)
