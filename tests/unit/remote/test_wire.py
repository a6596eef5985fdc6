"""What goes between the server and an engine's process comes out as it went in."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import (
    EngineStopped,
    ImagesBusy,
    InvalidImage,
    InvalidRequest,
    ModelError,
    NoGrammars,
    QueueFull,
)
from engine.core.commit import PROMPT_LOGPROBS_AT_ONCE
from engine.process import sockets as frames
from engine.process.sockets import FrameBuffer, ProtocolError
from engine.remote import wire
from engine.remote.calls import CALLS
from engine.remote.wire import CANCEL, CallMessage, Kind, Raised
from engine.values.images import Detail, Image, PreparedImage
from engine.values.output import FinishReason, OutputEvent, TokenLogprob, Usage
from engine.values.request import (
    Alternative,
    Constraint,
    Dry,
    Grammar,
    GrammarKind,
    LoopLimit,
    Markup,
    Request,
    SamplingParams,
    ThinkingBlock,
    ThinkingBudget,
    WaitReason,
    Xtc,
)
from engine.values.settings import DiskCacheConfig, EngineConfig
from engine.values.stats import ALL_TIERS, CacheTier, Cleared, Probed, RequestInfo
from engine.values.tokens import pack
from engine.values.tree import NodeTokens, TreeChanges
from kvstore.disk.types import DiskError
from tests.contract.fake_engine import CARD, PICTURE, FakeEngine, Script

STATS = asyncio.run(FakeEngine(Script()).stats())
REQUEST = Request(
    "a",
    pack((1, 2, 150_000)),
    3,
    SamplingParams(
        logit_bias={7: -100.0, 8: 1.5},
        allowed_token_ids=frozenset({7, 8}),
        bad_words=((7,), (8, 9)),
        seed=2**62,
        xtc=Xtc(0.5, 0.1, (2, 10)),
        dry=Dry(0.8, breakers=((10,), (11, 12))),
    ),
    stop=("ü",),
    stop_token_ids=frozenset({4, 5}),
    named_stops={6: "<|end|>"},
    markup=Markup((("<think>", "</think>"), ("[", "")), ("{",), "</think>"),
    loops=LoopLimit(64, 2, 3),
    speculate=False,
    prediction=pack((6, 150_000)),
    constraint=Constraint(
        Grammar(GrammarKind.REGEX, "a*"),
        "response_format",
        thinking=ThinkingBlock((), (3, 4)),
        instead=Alternative(9, Constraint(Grammar(GrammarKind.LARK, "start: x"), "tools")),
    ),
    thinking_budget=ThinkingBudget(10, (1,), (2,)),
)
IMAGE = Image(bytes(range(200, 232)), ((1, 2),), (1, 2, 4), "/a/c.npy")
CONFIG = EngineConfig("model", disk=DiskCacheConfig(Path("/tmp/cache"), 1 << 30))
EXAMPLES: Sequence[tuple[str, tuple[object, ...], object]] = (
    ("load", (CONFIG, logging.INFO), CARD),
    ("submit", (REQUEST,), None),
    ("abort", ("a",), None),
    ("check", (REQUEST,), None),
    (
        "prepare_image",
        ("/images/a", "/images", Detail.LOW),
        PreparedImage(
            Image(bytes(range(224, 256)), ((1, 2), (4, 2)), (2, 2), "/images/b.npy", is_whole=True),
            (3, 5, 5, 4, 5, 5, 3),
        ),
    ),
    ("stats", (), STATS),
    ("clear_cache", ("name", frozenset({CacheTier.DISK})), Cleared(3, 4)),
    ("prepare_image", ("/a/b", "/a", Detail.LOW), PreparedImage(IMAGE, (7, 9, 9, 8))),
    ("probe", (pack((1, 2)), "salt", "adapter", (IMAGE,)), Probed(2, ("ab",))),
    ("give_back", (0.25,), 12),
    ("requests", (), (RequestInfo("a", 0, WaitReason.SLOTS, 1, 2, 3, 4, 5, 6),)),
    ("tree", (7,), PICTURE),
    (
        "tree",
        (7,),
        TreeChanges.between(PICTURE, replace(PICTURE, version=8, nodes=PICTURE.nodes[1:])),
    ),
    ("node", (3, 10), NodeTokens(3, 12, (1, 2))),
    ("node", (3, 10), None),
    ("drain", (0.5,), None),
)
EVENTS = st.builds(
    OutputEvent,
    request_id=st.text(st.characters(codec="utf-8")),
    index=st.integers(0, 9),
    text=st.text(st.characters(codec="utf-8")),
    token_ids=st.lists(st.integers(0, 200_000)).map(tuple),
    finish_reason=st.sampled_from([None, *FinishReason]),
    stopped_by=st.none() | st.integers(0, 9) | st.just("7"),
    usage=st.none() | st.just(Usage(1, 2, 3)),
    error=st.none() | st.just("it failed"),
)


def body(frame: bytes) -> bytes:
    (whole,) = FrameBuffer().add(frame)
    return whole


def read_events(frame_body: bytes) -> list[OutputEvent]:
    kind, _, json = wire.read_frame(frame_body)
    assert kind == Kind.EVENTS
    return wire.EVENTS.validate_json(json)


def again(error: Exception) -> Exception:
    """The error as the server raises it."""
    return wire.RAISED.validate_json(wire.RAISED.dump_json(Raised.of(error))).exception()


def test_every_call_is_among_the_examples() -> None:
    assert {name for name, _, _ in EXAMPLES} == set(CALLS)


@pytest.mark.parametrize(("name", "arguments"), [example[:2] for example in EXAMPLES])
def test_calls(name: str, arguments: tuple[object, ...]) -> None:
    call = CALLS[name]
    message = CallMessage.read(body(CallMessage(2**40, name, call.json(*arguments)).frame()))
    assert (message.number, message.name) == (2**40, name)
    assert call.arguments.validate_json(message.json) == arguments


def test_defaults_are_sent() -> None:
    clear = CALLS["clear_cache"]
    assert clear.arguments.validate_json(clear.json()) == (None, ALL_TIERS)


def test_vectors_take_a_third_more_than_their_bytes() -> None:
    event = OutputEvent("a", 0, pooled=bytes(range(256)) * 64)
    [frame] = map(body, wire.events_frames([event]))
    assert read_events(frame) == [event]
    assert len(frame) < 1.4 * len(event.pooled)


@pytest.mark.parametrize(("name", "result"), [(name, result) for name, _, result in EXAMPLES])
def test_results(name: str, result: object) -> None:
    types = CALLS[name].result
    frame = wire.frame(Kind.RETURNED, types.dump_json(result), 2**40)
    kind, number, json = wire.read_frame(body(frame))
    assert (kind, number) == (Kind.RETURNED, 2**40)
    assert types.validate_json(json) == result


def test_cancellations() -> None:
    assert CallMessage.read(body(CallMessage(7, CANCEL).frame())) == CallMessage(7, CANCEL)


@given(st.lists(EVENTS, max_size=3))
def test_events(events: list[OutputEvent]) -> None:
    [frame] = map(body, wire.events_frames(events))
    assert read_events(frame) == events


def test_log_probabilities_may_be_infinite() -> None:
    event = OutputEvent("a", 0, token_ids=(3,), logprobs=(TokenLogprob(3, -inf, ((4, -inf),)),))
    [frame] = map(body, wire.events_frames([event]))
    assert read_events(frame) == [event]


def test_long_events_of_a_step_take_several_frames_in_order() -> None:
    """As the logprobs of a long prompt do: a frame that is too long would end the engine."""
    top = tuple((token, -1.5 * token) for token in range(20))
    part = (TokenLogprob(1, -2.25, top),) * PROMPT_LOGPROBS_AT_ONCE
    events = [OutputEvent("a", index, prompt_logprobs=part) for index in range(20)]
    frames = [body(frame) for frame in wire.events_frames(events)]
    assert len(frames) > 1
    assert max(map(len, frames)) <= wire.MAX_EVENTS_BYTES
    assert [event for frame in frames for event in read_events(frame)] == events


def test_a_call_or_result_beyond_a_frame_is_refused_where_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 100)
    with pytest.raises(ProtocolError, match="100 are the most"):
        CallMessage(1, "submit", CALLS["submit"].json(REQUEST)).frame()
    with pytest.raises(ProtocolError, match="100 are the most"):
        wire.frame(Kind.RETURNED, bytes(100))


class UnlistedError(ModelError):
    """A class that the table of errors does not list."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EngineStopped("it has stopped"), EngineStopped),
        (ModelError("no such model"), ModelError),
        (UnlistedError("no such kind"), ModelError),
        (NoGrammars("none"), NoGrammars),
        (DiskError("in use"), DiskError),
        (KeyError("whatever"), RuntimeError),
    ],
)
def test_errors(error: Exception, kind: type[Exception]) -> None:
    assert type(again(error)) is kind
    assert str(again(error)) == str(error)


def test_errors_with_more_than_words() -> None:
    invalid = again(InvalidRequest("too long", "prompt"))
    assert isinstance(invalid, InvalidRequest)
    assert (str(invalid), invalid.param) == ("too long", "prompt")
    busy = again(ImagesBusy("too many", 3))
    assert isinstance(busy, ImagesBusy)
    assert (str(busy), busy.retry_after_seconds) == ("too many", 3)
    unread = again(InvalidImage("no image"))
    assert isinstance(unread, InvalidImage)
    assert str(unread) == "no image"
    full = again(QueueFull("no room", 7))
    assert isinstance(full, QueueFull)
    assert (str(full), full.retry_after_seconds) == ("no room", 7)
