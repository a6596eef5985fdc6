"""The chat client's parts that do no I/O."""

import json
from collections.abc import Iterator

import pytest

from server.terminal.chat.conversation import Conversation
from server.terminal.client.answer import Answer
from server.terminal.client.events import Event, Finish, Reasoning, Text, Usage
from server.terminal.client.sse import EventStream
from server.terminal.client.wire import (
    MAX_ERROR_CHARACTERS,
    ServedModel,
    chunk_events,
    error_message,
    listed_models,
)
from server.terminal.errors import TerminalError
from server.terminal.text import printable


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


def chunk(finish_reason: str | None = None, **delta: str | None) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


COUNTS = {"prompt_tokens": 9, "completion_tokens": 4}


@pytest.mark.parametrize(
    ("content", "events"),
    [
        (chunk(role="assistant", content=""), []),
        (chunk(role="assistant", content=None), []),
        (chunk(content="a"), [Text("a")]),
        (chunk("length", content="a"), [Text("a"), Finish("length")]),
        (chunk(reasoning_content="hm"), [Reasoning("hm")]),
        (chunk(reasoning="hm"), [Reasoning("hm")]),
        ({"choices": [], "usage": COUNTS}, [Usage(9, None, 4)]),
        (
            {"choices": [], "usage": {**COUNTS, "prompt_tokens_details": {"cached_tokens": 0}}},
            [Usage(9, 0, 4)],
        ),
        ({"choices": [], "usage": {**COUNTS, "prompt_tokens_details": None}}, [Usage(9, None, 4)]),
        ({**chunk("stop"), "usage": COUNTS}, [Finish("stop"), Usage(9, None, 4)]),
        ({**chunk(content="a"), "usage": None, "error": None, "other": 1}, [Text("a")]),
    ],
)
def test_the_news_in_a_chunk(content: object, events: list[Event]) -> None:
    assert list(chunk_events(json.dumps(content).encode())) == events


@pytest.mark.parametrize(
    "data", [b"not json", b"[]", b'{"choices": 3}', b"\xff", b'{"choices": [{"delta": "a"}]}']
)
def test_what_is_no_chunk(data: bytes) -> None:
    with pytest.raises(TerminalError, match="not a chunk"):
        list(chunk_events(data))


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
        list(chunk_events(b'{"error": {"message": "it broke"}, "choices": []}'))


def test_the_models_listed() -> None:
    body = b'{"object": "list", "data": [{"id": "a/b", "max_model_len": 64}, {"id": "c"}]}'
    assert listed_models(body) == [ServedModel("a/b", 64), ServedModel("c", None)]
    with pytest.raises(TerminalError, match="not a list of models"):
        listed_models(b'{"data": []}')


def heard(*events: tuple[Event, float]) -> Answer:
    """An answer to a question asked at ten seconds past."""
    answer = Answer(asked_at=10.0)
    for event, now in events:
        answer.add(event, now)
    return answer


def test_an_answer_is_its_text_and_a_line_about_it() -> None:
    answer = heard(
        (Text("Hel"), 10.5),
        (Text("lo"), 11.0),
        (Finish("stop"), 12.5),
        (Usage(1234, 1000, 5), 12.6),
    )
    assert answer.text == "Hello"
    assert answer.summary() == (
        "prompt 1,234 tokens (1,000 cached) · answer 5 tokens · 2.0 tokens/s · first after 0.50 s"
    )


def test_reasoning_takes_time_but_is_not_the_answer() -> None:
    answer = heard((Reasoning("hm"), 11.0), (Text("Yes"), 13.0), (Usage(8, 0, 5), 13.0))
    assert answer.text == "Yes"
    assert answer.summary() == (
        "prompt 8 tokens (0 cached) · answer 5 tokens · 2.0 tokens/s · first after 1.00 s"
    )


@pytest.mark.parametrize(
    ("events", "summary"),
    [
        ([], ""),
        ([(Text("a"), 11.0), (Text("b"), 12.0)], "first after 1.00 s"),
        (
            [(Text("ab"), 11.0), (Finish("stop"), 11.1), (Usage(8, None, 9), 12.0)],
            "prompt 8 tokens · answer 9 tokens · first after 1.00 s",
        ),
        (
            [(Finish("stop"), 11.0), (Usage(8, None, 1), 11.0)],
            "prompt 8 tokens · answer 1 tokens",
        ),
        ([(Text("a"), 11.0), (Finish("length"), 11.0)], "first after 1.00 s · cut off by the"),
        ([(Finish("content_filter"), 11.0)], "ended by content_filter"),
    ],
)
def test_what_is_not_known_is_left_out(events: list[tuple[Event, float]], summary: str) -> None:
    assert heard(*events).summary().removesuffix(" token limit") == summary


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


def test_asking_changes_nothing_and_clearing_keeps_the_system_prompt() -> None:
    conversation = Conversation().with_system("Be brief.").answered("Hi", "Hello")
    assert conversation.asking("Why?") == conversation.asking("Why?")
    assert conversation.cleared() == Conversation("Be brief.")
    assert conversation.with_system("").asking("Why?")[0]["role"] == "user"


def test_control_characters_are_taken_out_and_nothing_else() -> None:
    every_byte = "".join(map(chr, range(256)))
    kept = "\t\n" + "".join(map(chr, range(0x20, 0x7F))) + "".join(map(chr, range(0xA0, 256)))
    assert printable(every_byte) == kept
    assert printable("wörld 木 🌳\u2028") == "wörld 木 🌳\u2028"
