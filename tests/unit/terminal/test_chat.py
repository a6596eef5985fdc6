"""The chat: what it reads of a server, its line editor, and its lines."""

import json
import re
import stat
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from server.terminal.chat import COMMANDS, Conversation
from server.terminal.chat_screen import (
    MAX_HISTORY_BYTES,
    SHOWN_AFTER_MS,
    Screen,
    WordWrap,
    history_file,
    history_in,
    line_reader,
)
from server.terminal.client import (
    MAX_ERROR_CHARACTERS,
    Answer,
    EventStream,
    PromptProgress,
    error_message,
    parse_chunk,
    parse_models,
)
from server.terminal.console import TerminalError, printable
from tests.polling import until

JsonObject = dict[str, object]


def in_pieces(stream: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(stream), size):
        yield stream[start : start + size]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("stream", "data"),
    [
        ("data: a\n\ndata: b\n\n", ["a", "b"]),
        ("data:a\n\ndata:  b \n\n", ["a", " b "]),
        ("data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
        (": keep-alive\n\ndata: a\n: keep-alive\ndata: b\n\n", ["a\nb"]),
        ("event: x\nid: 3\nretry: 10\ndata: a\n\n", ["a"]),
        ('data: {"a": "b: c"}\n\n', ['{"a": "b: c"}']),
        ("data: a\u2028b\u0085c\x0bd\x1ce\n\n", ["a\u2028b\u0085c\x0bd\x1ce"]),
        ("data: wörld\n\n\n\ndata: a\n\n", ["wörld", "a"]),
        ("data\n\n", [""]),
        ("data: a\n\ndata: cut off", ["a"]),
        ("", []),
    ],
)
def test_events_whatever_the_pieces_they_come_in(stream: str, data: list[str], size: int) -> None:
    events = EventStream()
    fed = [d for piece in in_pieces(stream.encode(), size) for d in events.feed(piece)]
    assert [d.decode() for d in fed] == data


def chunk(finish_reason: str | None = None, **delta: str | None) -> JsonObject:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


COUNTS = {"prompt_tokens": 9, "completion_tokens": 4}


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (chunk(role="assistant", content=""), ("", "", "", None)),
        (chunk(role="assistant", content=None), ("", "", "", None)),
        (chunk(content="a"), ("a", "", "", None)),
        (chunk("length", content="a"), ("a", "", "length", None)),
        (chunk(reasoning_content="hm"), ("", "hm", "", None)),
        (chunk(reasoning="hm"), ("", "hm", "", None)),
        (chunk(reasoning="hm", content="a"), ("a", "hm", "", None)),
        ({"choices": [], "usage": COUNTS}, ("", "", "", (9, None, 4))),
        (
            {"choices": [], "usage": {**COUNTS, "prompt_tokens_details": {"cached_tokens": 0}}},
            ("", "", "", (9, 0, 4)),
        ),
        (
            {"choices": [], "usage": {**COUNTS, "prompt_tokens_details": None}},
            ("", "", "", (9, None, 4)),
        ),
        ({**chunk("stop"), "usage": COUNTS}, ("", "", "stop", (9, None, 4))),
        ({**chunk(content="a"), "usage": None, "error": None, "other": 1}, ("a", "", "", None)),
    ],
)
def test_the_parts_of_a_chunk(content: object, parts: tuple[object, ...]) -> None:
    chunk = parse_chunk(json.dumps(content).encode())
    usage = chunk.usage and (
        chunk.usage.prompt_tokens,
        chunk.usage.cached_tokens,
        chunk.usage.completion_tokens,
    )
    assert (chunk.text, chunk.reasoning, chunk.finish_reason, usage) == parts


@pytest.mark.parametrize(
    "data", [b"not json", b"[]", b'{"choices": 3}', b"\xff", b'{"choices": [{"delta": "a"}]}']
)
def test_what_is_no_chunk(data: bytes) -> None:
    with pytest.raises(TerminalError, match="not a chunk"):
        parse_chunk(data)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "no  room\nhere", "type": "x", "code": None}}, "no room here"),
        ({"error": "no room"}, "no room"),
        ({"object": "error", "message": "no room"}, "no room"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"error": {"code": 3}}, '{"error": {"code": 3}}'),
        ({"error": {"message": "\ud800"}}, "?"),
    ],
)
def test_what_an_error_says(body: object, message: str) -> None:
    assert error_message(json.dumps(body).encode()) == message


def test_an_error_too_deep_to_be_read_is_shown_as_it_is() -> None:
    assert error_message(b'{"error":' * 100_000).startswith('{"error":{"error":')


def test_a_line_that_does_not_end_is_given_up() -> None:
    events = EventStream()
    list(events.feed(b"x" * 2**24))
    with pytest.raises(TerminalError, match="16 MiB"):
        list(events.feed(b"x"))


def test_an_error_that_is_a_page_is_cut() -> None:
    message = error_message(b"<html>\n  <body>" + b"x" * 10_000)
    assert message.startswith("<html> <body>xxx")
    assert len(message) == MAX_ERROR_CHARACTERS + 1


def test_an_error_in_a_chunk() -> None:
    with pytest.raises(TerminalError, match=r"^it broke$"):
        parse_chunk(b'{"error": {"message": "it broke"}, "choices": []}')


def test_the_models_listed() -> None:
    body = b'{"object": "list", "data": [{"id": "a/b", "max_model_len": 64}, {"id": "c"}]}'
    listed = [(model.name, model.context_tokens) for model in parse_models(body)]
    assert listed == [("a/b", 64), ("c", None)]
    with pytest.raises(TerminalError, match="not a list of models"):
        parse_models(b'{"data": []}')


def usage(prompt_tokens: int, cached_tokens: int | None, completion_tokens: int) -> JsonObject:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {"usage": {**counts, "prompt_tokens_details": {"cached_tokens": cached_tokens}}}


def received(*chunks: tuple[JsonObject, float]) -> Answer:
    """An answer to a question asked at ten seconds past."""
    answer = Answer(asked_at=10.0)
    for content, now in chunks:
        answer.add(parse_chunk(json.dumps(content).encode()), now)
    return answer


def test_an_answer_is_its_text_and_a_line_about_it() -> None:
    answer = received(
        (chunk(content="Hel"), 10.5),
        (chunk(content="lo"), 11.0),
        (chunk("stop"), 12.5),
        (usage(1234, 1000, 5), 12.6),
    )
    assert answer.text == "Hello"
    assert answer.summary() == (
        "prompt 1,234 tokens (1,000 cached) · answer 5 tokens · 2.0 tokens/s · first after 0.50 s"
    )


def test_reasoning_takes_time_but_is_not_the_answer() -> None:
    answer = received(
        (chunk(reasoning="hm"), 11.0), (chunk(content="Yes"), 13.0), (usage(8, 0, 5), 13.0)
    )
    assert answer.text == "Yes"
    assert answer.summary() == (
        "prompt 8 tokens (0 cached) · answer 5 tokens · 2.0 tokens/s · first after 1.00 s"
    )


@pytest.mark.parametrize(
    ("chunks", "summary"),
    [
        ([], ""),
        ([(chunk(content="a"), 11.0), (chunk(content="b"), 12.0)], "first after 1.00 s"),
        (
            [(chunk(content="ab"), 11.0), (chunk("stop"), 11.1), (usage(8, None, 9), 12.0)],
            "prompt 8 tokens · answer 9 tokens · first after 1.00 s",
        ),
        (
            [(chunk("stop"), 11.0), (usage(8, None, 1), 11.0)],
            "prompt 8 tokens · answer 1 tokens",
        ),
        (
            [(chunk(content="a"), 11.0), (chunk("length"), 11.0)],
            "first after 1.00 s · cut off by the",
        ),
        ([(chunk("content_filter"), 11.0)], "ended by content_filter"),
    ],
)
def test_what_is_not_known_is_left_out(
    chunks: list[tuple[JsonObject, float]], summary: str
) -> None:
    assert received(*chunks).summary().removesuffix(" token limit") == summary


def test_a_conversation_is_system_turns_and_the_question() -> None:
    conversation = Conversation("Be brief.").answered("Hi", "Hello").answered("So?", "Yes")
    assert conversation.asking("Why?") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "Why?"},
    ]


def test_asking_changes_nothing_and_no_system_prompt_is_no_message() -> None:
    conversation = Conversation().answered("Hi", "Hello")
    assert conversation.asking("Why?") == conversation.asking("Why?")
    assert conversation.asking("Why?")[0]["role"] == "user"


def test_control_characters_are_taken_out_and_nothing_else() -> None:
    every_byte = "".join(map(chr, range(256)))
    kept = "\t\n" + "".join(map(chr, range(0x20, 0x7F))) + "".join(map(chr, range(0xA0, 256)))
    assert printable(every_byte) == kept
    assert printable("wörld 木 🌳\u2028") == "wörld 木 🌳\u2028"


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


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (f"one{ENTER}", "one"),
        (f"one{ALT_ENTER}two{ENTER}", "one\ntwo"),
        (f"see: \x1b[200~one\r\n/exit\rthree\x1b[201~{ENTER}", "see: one\n/exit\nthree"),
        (f"one{ALT_ENTER}two{CTRL_C}three{ENTER}", "three"),
        (f"one{CTRL_D}{ENTER}", "one"),
    ],
    ids=["enter", "alt-enter", "a paste", "ctrl-c takes back", "ctrl-d in a line"],
)
def test_keys_are_a_line(typed: Typed, keys: str, line: str) -> None:
    assert typed(keys) == line


@pytest.mark.parametrize(("key", "left"), [(CTRL_C, KeyboardInterrupt), (CTRL_D, EOFError)])
def test_ctrl_c_and_ctrl_d_leave_where_nothing_is_typed(
    typed: Typed, key: str, left: type[BaseException]
) -> None:
    with pytest.raises(left):
        typed(key)


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


WIDTH = 20


def shown(text: str, piece_size: int) -> list[str]:
    """The lines on a terminal that knows two control sequences: back, and erase to the end."""
    wrap, lines = WordWrap(), [""]
    for start in range(0, len(text), piece_size):
        printed = wrap.take(text[start : start + piece_size], WIDTH)
        for back, rest in re.findall(r"\x1b\[(\d+)D\x1b\[K|([^\x1b])", printed):
            if back:
                lines[-1] = lines[-1][: -int(back)]
            elif rest == "\n":
                lines.append("")
            else:
                lines[-1] += rest
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("piece_size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("The quick brown fox jumps.", ["The quick brown fox", "jumps."]),
        ("one  two\n\n  indented text\n", ["one  two", "", "  indented text", ""]),
        ("an internationalization", ["an", "internationalization"]),
        ("x" * 50 + " end", ["x" * 50, "end"]),
        ("a\tb", ["a    b"]),
        ("木" * 12 + " ok", ["木" * 9, "木木木 ok"]),
        ("ten 🌳🌳🌳🌳🌳🌳🌳🌳 trees", ["ten 🌳🌳🌳🌳🌳🌳🌳", "🌳 trees"]),
        ("", [""]),
    ],
)
def test_lines_break_at_words_whatever_the_pieces(
    text: str, lines: list[str], piece_size: int
) -> None:
    assert shown(text, piece_size) == lines


def test_a_word_is_seen_before_it_ends() -> None:
    assert WordWrap().take("Hel", WIDTH) == "Hel"


def progress(processed: int, time_ms: int, total: int = 1000, cache: int = 200) -> PromptProgress:
    return PromptProgress(total=total, cache=cache, processed=processed, time_ms=time_ms)


def test_the_time_that_reading_a_prompt_takes_yet_is_at_its_pace_so_far() -> None:
    assert progress(600, 4000).seconds_left == pytest.approx(4.0)
    assert progress(1000, 4000).seconds_left == 0
    assert progress(200, 4000).seconds_left is None
    assert progress(0, 0, total=0, cache=0).share == 1


def test_reading_is_shown_where_it_takes_long_and_gone_when_the_answer_comes() -> None:
    shown = StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    screen = Screen(input, console, console)
    with screen.reading() as reading:
        reading(progress(300, SHOWN_AFTER_MS // 2))
        assert shown.getvalue() == ""
        reading(progress(600, 4000))
        until(lambda: "600 of 1,000 tokens, 0:04 left" in shown.getvalue())
        reading(None)
        length = len(shown.getvalue())
        screen.answer("Hello")
        assert shown.getvalue()[length:] == "Hello"


def test_reading_is_not_shown_in_a_pipe() -> None:
    shown = StringIO()
    console = Console(file=shown, force_terminal=False)
    with Screen(input, console, console).reading() as reading:
        reading(progress(600, 4000))
    assert shown.getvalue() == ""
