"""The trained model, scored twice: `python -m tests.conformance.demo`.

A daemon's engine that is warm, crowded and short of blocks answers held-out questions, in another
order each time; mlx-lm answers the same ones alone, one after the other. The answers must be equal,
token for token, but where mlx-lm itself finds two tokens as good as each other. With --kv-format
they may differ, and as many must be right, but for a few.
"""

# ruff: noqa: E402 - MLX comes after the BLAS

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Annotated, TypeAlias

from engine.mlx_backend.blas import load_blas
from engine.values.tokens import pack

load_blas()

import mlx.core as mx
import typer
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from rich.console import Console
from rich.markup import escape

from engine.api import Engine
from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT
from engine.values.request import Request, SamplingParams
from engine.values.settings import EngineConfig, KVFormat
from engine.values.stats import EngineStats
from load_tests.report import Table
from tests.golden.driving import NEAR_TIE, shortfall
from tests.hosting import launched
from tools.demo_model.score import Question, held_out, is_right
from tools.demo_model.words import split_words
from tools.events import events_of

PER_TASK = 20
MAX_TOKENS = 256
CONFIG = EngineConfig(
    model="", kv_cache_bytes=6 << 20, block_size=8, max_running=32, max_waiting=4096
)
"""1,200 tokens: questions of 50 to 900 with their answers, so running ones are preempted, too."""

Answer: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question as the model is told it."""

    question: Question
    prompt: tuple[int, ...]


class Scorer:
    """Both sides' answers to the same prompts."""

    def __init__(self, engine: Engine, peer: Module, eos_token_id: int) -> None:
        self._engine = engine
        self._peer = peer
        self._eos_token_id = eos_token_id

    async def of_daemon(self, asked: Sequence[Asked], seed: int) -> list[Answer]:
        """All at once, in an order of its own."""
        order = random.Random(seed).sample(range(len(asked)), len(asked))
        said = await asyncio.gather(
            *(self._answer(f"{seed}-{at}", asked[at].prompt) for at in order)
        )
        answers = dict(zip(order, said, strict=True))
        return [answers[at] for at in range(len(asked))]

    def of_peer(self, prompt: Sequence[int]) -> Answer:
        """Greedy, over mlx-lm's own cache; without the token that ends it."""
        cache, tokens, said = make_prompt_cache(self._peer), list(prompt), list[int]()
        while len(said) < MAX_TOKENS:
            logits = self._peer(mx.array([tokens]), cache=cache)
            tokens = [int(logits[0, -1].argmax().item())]
            if tokens[0] == self._eos_token_id:
                break
            said += tokens
        return tuple(said)

    def is_as_good(self, prompt: Sequence[int], found: Answer, expected: Answer) -> bool:
        """Whether the first token that differs is a tie by mlx-lm's own logits."""
        pairs = zip_longest(found, expected, fillvalue=self._eos_token_id)
        same = next(at for at, (ours, theirs) in enumerate(pairs) if ours != theirs)
        ours = (*found, self._eos_token_id)[: same + 1]
        return shortfall(self._peer, prompt, ours) < NEAR_TIE

    async def _answer(self, name: str, prompt: tuple[int, ...]) -> Answer:
        request = Request(name, pack(prompt), MAX_TOKENS, SamplingParams(temperature=0))
        said = [
            token async for event in events_of(self._engine, request) for token in event.token_ids
        ]
        return tuple(said[:-1] if said and said[-1] == self._eos_token_id else said)


def questions(per_task: int) -> list[Question]:
    """The first so many of each task."""
    found: dict[str, list[Question]] = {}
    for question in held_out(split_words()[1], seed=0):
        found.setdefault(question.task, []).append(question)
    return [question for of_task in found.values() for question in of_task[:per_task]]


def hardships(stats: EngineStats) -> list[str]:
    """What the daemon's run was to meet and did not."""
    met = {
        "nothing was cached": stats.cache.hit_tokens,
        "nothing was evicted": stats.cache.evictions,
        "nothing was preempted": stats.preemptions,
    }
    return [problem for problem, count in met.items() if not count]


@dataclass(frozen=True, slots=True)
class Compared:
    """A question with mlx-lm's answer, and the daemon's in each round."""

    asked: Asked
    expected: Answer
    found: tuple[Answer, ...]

    def others(self) -> list[Answer]:
        return [answer for answer in self.found if answer != self.expected]


MOST_LOST = 0.02
"""The share of all answers that a KV format may make wrong."""


def demo_engine(kv_format: KVFormat) -> tuple[Engine, Scorer]:
    engine = launched(replace(CONFIG, kv_format=kv_format))
    peer: Module = load_model(DEFAULT_CHECKPOINT)[0]
    peer.set_dtype(mx.float32)  # in which the daemon computes on a CPU
    (eos_token_id,) = engine.card.eos_token_ids
    return engine, Scorer(engine, peer, eos_token_id)


def prompt_of(engine: Engine, question: Question) -> tuple[int, ...]:
    tools = {"tools": list(question.tools)} if question.tools else {}
    return tuple(engine.tokenizer.apply_chat_template(question.messages, **tools))


async def asked_daemon(
    engine: Engine, scorer: Scorer, asked: Sequence[Asked], rounds: int
) -> tuple[list[list[Answer]], list[str]]:
    """The answers of each round, and what the rounds have not met."""
    found = [await scorer.of_daemon(asked, seed) for seed in range(rounds)]
    missing = hardships(await engine.stats())
    await engine.drain(timeout_seconds=10)
    return found, missing


def lost(engine: Engine, compared: Sequence[Compared]) -> list[str]:
    """What a KV format has made worse, if it is too much."""

    def is_right_answer(one: Compared, answer: Answer) -> bool:
        return is_right(one.asked.question, engine.tokenizer.decode(answer))

    alone = [is_right_answer(one, one.expected) for one in compared]
    stored = [is_right_answer(one, answer) for one in compared for answer in one.found]
    share = sum(alone) / len(alone) - sum(stored) / len(stored)
    return [f"{share:.1%} fewer answers are right"] if share > MOST_LOST else []


def table(engine: Engine, compared: Sequence[Compared]) -> Table:
    """Right answers by task."""
    by_task: dict[str, list[tuple[bool, list[bool]]]] = {}
    for one in compared:
        question = one.asked.question
        right = [is_right(question, engine.tokenizer.decode(each)) for each in one.found]
        alone = is_right(question, engine.tokenizer.decode(one.expected))
        by_task.setdefault(question.task, []).append((alone, right))
    rows = []
    for task, results in by_task.items():
        n_alone = sum(alone for alone, _ in results)
        rounds = zip(*(right for _, right in results), strict=True)
        rows.append((task, str(len(results)), str(n_alone), ", ".join(str(sum(r)) for r in rounds)))
    return Table(("task", "asked", "right, mlx-lm", "right, each round"), tuple(rows))


def main(
    per_task: Annotated[int, typer.Option(help="Questions of each task.")] = PER_TASK,
    rounds: Annotated[int, typer.Option(min=2, help="The first one is cold.")] = 2,
    kv_format: Annotated[KVFormat, typer.Option(help="Of the daemon.")] = KVFormat.AUTO,
) -> None:
    """Compare the answers; the exit status is 1 where one is another, or nothing was hard."""
    engine, scorer = demo_engine(kv_format)
    asked = [Asked(question, prompt_of(engine, question)) for question in questions(per_task)]
    found, problems = asyncio.run(asked_daemon(engine, scorer, asked, rounds))
    compared = [
        Compared(each, scorer.of_peer(each.prompt), answers)
        for each, answers in zip(asked, zip(*found, strict=True), strict=True)
    ]
    ties, others = 0, [(one, other) for one in compared for other in one.others()]
    if kv_format is not KVFormat.AUTO:
        problems = lost(engine, compared)
    for one, other in others if kv_format is KVFormat.AUTO else ():
        if scorer.is_as_good(one.asked.prompt, other, one.expected):
            ties += 1
        else:
            problems.append(f"another answer to {one.asked.question.messages}: {other}")
    console = Console()
    console.print(table(engine, compared).rich())
    as_good = f", {ties} of them where two tokens are as good" if ties else ""
    console.print(f"{len(compared) * rounds} answers, {len(others)} differ{as_good}")
    for problem in problems:
        console.print(f"[bold red]{escape(problem)}")
    raise typer.Exit(bool(problems))


if __name__ == "__main__":
    typer.run(main)
