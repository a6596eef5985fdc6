"""Plays a workload, users who talk to a server at the same time, and adds up what came of it."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from load_tests.client import (
    Answer,
    Asker,
    Generation,
    Listener,
    Target,
    connected,
    limited,
    message,
)
from load_tests.report import Percentiles, Table, percentiles
from load_tests.scenarios.workloads import Conversation, Workload

ENCODED_IMAGES = "rootstock_encoded_images_total"


@dataclass(frozen=True, slots=True)
class Run:
    """A workload, played once."""

    wall_seconds: float
    answers: tuple[Answer, ...]
    encoded_images: int | None = None  # where the server counts them


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in figures. All times in seconds, as the client saw them."""

    wall_seconds: float
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    completion_tokens_per_second: float  # over the whole run's wall time
    first_token_seconds: Percentiles
    gap_seconds: Percentiles  # between pieces of text; a piece is mostly one token
    latency_seconds: Percentiles
    earlier_tokens: int = 0  # of later turns: what the turn before had, and its answer but one
    resumed_tokens: int = 0  # of these, those that were cached
    encoded_images: int | None = None  # images that went through the vision tower, where counted

    @property
    def headline(self) -> str:
        """For a line of progress."""
        return f"{self.wall_seconds:.2f} s, first text after {self.first_token_seconds.p50:.2f} s"


async def play(workload: Workload, target: Target) -> Run:
    """Play the workload. Raises TargetError at the first thing that goes wrong."""
    async with limited(target), connected(target) as asker:
        before = await _encoded(asker, workload)
        player = _Player(asker, workload.generation, time.perf_counter())
        answers: list[Answer] = []
        for number, wave in enumerate(workload.waves):
            answers += await player.wave(number, wave, workload.concurrency)
        wall_seconds = time.perf_counter() - player.start
        after = await _encoded(asker, workload)
        encoded = None if after is None else after - (before or 0)
        return Run(wall_seconds, tuple(answers), encoded)


async def _encoded(asker: Asker, workload: Workload) -> int | None:
    has_images = any(conversation.images for wave in workload.waves for conversation in wave)
    return await asker.counted(ENCODED_IMAGES) if has_images else None


@dataclass(frozen=True, slots=True)
class _Player:
    asker: Asker
    generation: Generation
    start: float

    async def wave(
        self, number: int, conversations: tuple[Conversation, ...], concurrency: int
    ) -> list[Answer]:
        """`concurrency` users, each of whom takes the next conversation when done with one."""
        waiting = iter(enumerate(conversations))
        users = [self._user(number, waiting) for _ in range(concurrency)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(user) for user in users]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [answer for task in tasks for answer in task.result()]

    async def _user(self, wave: int, waiting: Iterator[tuple[int, Conversation]]) -> list[Answer]:
        answers: list[Answer] = []
        for number, conversation in waiting:
            messages = [message("system", conversation.system)] if conversation.system else []
            for turn, text in enumerate(conversation.turns):
                images = () if turn else conversation.images
                messages.append(message("user", text, images))
                listener = Listener()
                session = f"{wave}-{number}"
                await self.asker.ask(messages, self.generation, listener, session)
                messages.append(message("assistant", listener.text))
                place = wave, number, turn
                answers.append(listener.answer(self.generation, self.start, place))
        return answers


def summarize(run: Run) -> Summary:
    """Add up one run."""
    answers = run.answers
    later_turns = tuple(_later_turns(answers))
    generated = sum(a.completion_tokens for a in answers)
    return Summary(
        wall_seconds=run.wall_seconds,
        requests=len(answers),
        prompt_tokens=sum(a.prompt_tokens for a in answers),
        cached_tokens=sum(a.cached_tokens for a in answers),
        completion_tokens=generated,
        completion_tokens_per_second=generated / run.wall_seconds,
        first_token_seconds=percentiles(a.first_token_seconds for a in answers),
        gap_seconds=percentiles(gap for a in answers for gap in a.gap_seconds),
        latency_seconds=percentiles(a.latency_seconds for a in answers),
        earlier_tokens=sum(
            before.prompt_tokens + before.completion_tokens - 1 for before, _ in later_turns
        ),
        resumed_tokens=sum(after.cached_tokens for _, after in later_turns),
        encoded_images=run.encoded_images,
    )


def _later_turns(answers: Iterable[Answer]) -> Iterator[tuple[Answer, Answer]]:
    """Each answer of a conversation but the first, after the one before it."""
    conversations = dict[tuple[int, int], list[Answer]]()
    for answer in answers:
        conversations.setdefault((answer.wave, answer.conversation), []).append(answer)
    for turns in conversations.values():
        yield from pairwise(sorted(turns, key=lambda turn: turn.turn))


def run_table(summaries: Iterable[tuple[str, Summary]]) -> Table:
    """A row for every (scenario, summary). Durations are "median / 95th percentile"."""
    columns = (
        "scenario", "wall s", "prompt", "cached", "out", "tokens/s",
        "first token s", "gap ms", "latency s",
    )  # fmt: skip
    return Table(columns, tuple((name, *_cells(s)) for name, s in summaries))


def _cells(s: Summary) -> tuple[str, ...]:
    gap = s.gap_seconds
    return (
        f"{s.wall_seconds:.2f}",
        f"{s.prompt_tokens}",
        f"{s.cached_tokens}",
        f"{s.completion_tokens}",
        f"{s.completion_tokens_per_second:.1f}",
        f"{s.first_token_seconds.p50:.2f} / {s.first_token_seconds.p95:.2f}",
        f"{gap.p50 * 1000:.0f} / {gap.p95 * 1000:.0f}",
        f"{s.latency_seconds.p50:.2f} / {s.latency_seconds.p95:.2f}",
    )
