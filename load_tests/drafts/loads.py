"""The tasks, and the loads that each of them is made of."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from load_tests.drafts import bodies
from load_tests.drafts.bodies import Body
from load_tests.shapes import Shape

Model = Literal["demo", "random", "successor"]
Stream: TypeAlias = tuple[Body, ...]
"""Asked one after the other."""


@dataclass(frozen=True, slots=True)
class Load:
    """Streams beside each other. What is to be known already is asked `before`, and not measured.
    `least` is the ratio that is asked of it.
    """

    name: str
    model: Model
    streams: tuple[Stream, ...]
    before: tuple[Body, ...]
    least: float | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is asked. A stream that is alone asks `asks` times, or it would be over too soon."""

    prompt_words: int
    output_tokens: int
    asks: int
    texts: int  # for the demonstration model, whose answers are short
    records: int  # in an answer


SCALES: Mapping[Shape, Scale] = {
    "qwen3": Scale(512, 256, asks=2, texts=12, records=2),
    "wide": Scale(512, 256, asks=2, texts=12, records=2),
    "real": Scale(512, 256, asks=1, texts=12, records=1),
}
QUICK = Scale(64, 24, asks=1, texts=1, records=1)


def copy(scale: Scale, rng: random.Random) -> Iterator[Load]:
    yield _computed("copy", "demo", [_times(scale.texts, bodies.repeated, rng)], 2.0)
    yield _computed("copy", "successor", [_asks(scale, bodies.copied, rng)], 2.0)


def edit(scale: Scale, rng: random.Random) -> Iterator[Load]:
    yield _computed("edit", "demo", [_times(scale.texts, bodies.repeated_with_edits, rng)], 2.0)
    yield _computed("edit", "successor", [_asks(scale, bodies.edited, rng)], 2.0)


def resend(scale: Scale, rng: random.Random) -> Iterator[Load]:
    one = _asks(scale, bodies.greedy_chat, rng)
    yield Load("resend", "random", (one,), one, 3.0)
    eight = tuple((bodies.greedy_chat(rng, *_size(scale)),) for _ in range(8))
    yield Load("resend", "random", eight, tuple(asked for (asked,) in eight), 1.3)


def regenerate(scale: Scale, rng: random.Random) -> Iterator[Load]:
    """With the seed of the answer that is known, and with another one."""
    one = _asks(scale, bodies.random_chat, rng)
    yield Load("regenerate", "random", (one,), one)
    others = tuple({**asked, "seed": asked["seed"] + 1} for asked in one)
    yield Load("regenerate anew", "random", (one,), others)


def schema(scale: Scale, rng: random.Random) -> Iterator[Load]:
    demo = [bodies.records(rng, scale.records) for _ in range(_few(scale))]
    yield _computed("schema", "demo", [demo], 1.3)
    yield _computed("schema", "random", [[bodies.records(rng, scale.records)]], 1.3)


def tools(scale: Scale, rng: random.Random) -> Iterator[Load]:
    yield _computed("tools", "demo", [_times(_few(scale), bodies.called, rng)], 1.3)
    yield _computed("tools", "random", [_times(scale.asks, bodies.called, rng)], 1.3)


def unique(scale: Scale, rng: random.Random) -> Iterator[Load]:
    short = replace(scale, prompt_words=64)
    yield _computed("unique", "random", [_asks(short, bodies.random_chat, rng)], 0.98)
    for n_streams in (8, 32):
        asked = [(bodies.random_chat(rng, *_size(short)),) for _ in range(n_streams)]
        yield _computed("unique", "random", asked, 0.98)


def mixed(scale: Scale, rng: random.Random) -> Iterator[Load]:
    """As they come: prompts are computed beside the answers."""
    size = scale.prompt_words // 4, scale.output_tokens // 2
    yield _as_it_comes("chat", "random", [bodies.conversation(rng, 3, *size) for _ in range(4)])
    lines = [[bodies.records(rng, scale.records)] for _ in range(4)]
    yield _as_it_comes("JSON lines", "random", lines)
    yield _as_it_comes("tool loop", "demo", [bodies.tool_loop(rng) for _ in range(4)])
    edits = [[bodies.edited(rng, *_size(scale))] for _ in range(2)]
    beside = [[bodies.random_chat(rng, *_size(scale))] for _ in range(2)]
    yield _as_it_comes("code edits", "successor", [*edits, *beside])


TASKS: Mapping[str, Callable[[Scale, random.Random], Iterator[Load]]] = {
    task.__name__: task for task in (copy, edit, resend, regenerate, schema, tools, unique, mixed)
}


def draw(tasks: Sequence[str], scale: Scale, seed: int) -> list[Load]:
    """Of these tasks, in their order. Each draws from a source of its own."""
    return [load for name in tasks for load in TASKS[name](scale, random.Random(f"{name}/{seed}"))]


def _computed(
    name: str, model: Model, streams: Sequence[Sequence[Body]], least: float | None = None
) -> Load:
    """The prompts are in the cache, so that answers alone are measured."""
    asked = tuple(map(tuple, streams))
    prompts = tuple({**body, "max_tokens": 1} for stream in asked for body in stream)
    return Load(name, model, asked, prompts, least)


def _as_it_comes(name: str, model: Model, streams: Sequence[Sequence[Body]]) -> Load:
    return Load(f"mixed: {name}", model, tuple(map(tuple, streams)), (), 0.97)


def _size(scale: Scale) -> tuple[int, int]:
    return scale.prompt_words, scale.output_tokens


def _few(scale: Scale) -> int:
    return max(scale.texts // 4, 1)


def _asks(
    scale: Scale, make: Callable[[random.Random, int, int], Body], rng: random.Random
) -> Stream:
    return tuple(make(rng, *_size(scale)) for _ in range(scale.asks))


def _times(times: int, make: Callable[[random.Random], Body], rng: random.Random) -> Stream:
    return tuple(make(rng) for _ in range(times))
