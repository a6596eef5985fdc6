"""What drafting costs: `python -m load_tests.bench.drafting [--json PATH]`. No model, no tensors.

Behind prompts of several lengths a sequence generates tokens, and drafts in front of each. Texts
are made of runs that come again, as they do in code and JSON, or of unrelated tokens, so that all
sources are asked in vain. Others' answers are of the same kind, as many as are remembered. The tree
has the prompt and an answer that the sequence leaves at once, so it is looked at again and again.
Build is the first draft; lookup is what the tree says behind the prompt, 512 tokens. Medians of the
sequences' own medians.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from engine.drafts.sources import MOST_TOKENS, TREE_TOKENS, Answers, Drafter
from engine.drafts.suffix_index import SortedText
from kvstore.lease import Refusal
from kvstore.pool import BlockPool, blocks_for
from kvstore.store import KVStore
from kvstore.tokens import Tokens
from kvstore.tree import RadixTree
from kvstore.types import Namespace
from load_tests.report import Table, percentile
from load_tests.terminal import show_figures

PROMPT_TOKENS = (1_000, 8_000, 32_000)
ANSWER_TOKENS, DRAFT_TOKENS = 1_000, 8
BLOCK_SIZE_TOKENS = 32
VOCABULARY = 150_000
NAMESPACE = Namespace(model="benchmark")

Text: TypeAlias = Callable[[random.Random, int], list[int]]


def repeated(source: random.Random, n_tokens: int) -> list[int]:
    """Runs of 2 to 20 tokens, all from the same 400."""
    tokens = list[int]()
    while len(tokens) < n_tokens:
        start = source.randrange(380)
        tokens += range(start, start + source.randint(2, 20))
    return tokens[:n_tokens]


def unrelated(source: random.Random, n_tokens: int) -> list[int]:
    return source.choices(range(VOCABULARY), k=n_tokens)


TEXTS: tuple[Text, ...] = (repeated, unrelated)


@dataclass(frozen=True, slots=True)
class Times:
    """Of one sequence, in seconds."""

    build: float
    accept: float
    drafts: tuple[float, ...]
    lookup: float
    found: float
    """The share of tokens in front of which there was a draft."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians over sequences."""

    text: str
    prompt_tokens: int
    build_milliseconds: float
    accept_microseconds: float
    draft_microseconds: float
    draft_p99_microseconds: float
    lookup_microseconds: float
    found_percent: float


class Workload:
    """A tree and answers as a daemon has them, and sequences of one kind of text."""

    def __init__(self, text: Text, prompt_tokens: int) -> None:
        self._random = random.Random(1)
        self._text = text
        self._prompt = text(self._random, prompt_tokens)
        self._store = self._serving([*self._prompt, *text(self._random, ANSWER_TOKENS)])
        self._answers = Answers()
        for _ in range(MOST_TOKENS // ANSWER_TOKENS):
            self._answers.add(NAMESPACE, text(self._random, ANSWER_TOKENS))
        self._answers.propose(NAMESPACE, self._prompt, 1)  # what was added is indexed now

    def sequence(self) -> Times:
        """Generate an answer behind the prompt."""
        tokens = Tokens(self._prompt)
        continuation = partial(self._store.continuation, NAMESPACE, tokens)
        answers = partial(self._answers.propose, NAMESPACE)
        drafter = Drafter(SortedText(self._prompt), (), continuation, answers, tuple)
        lookup = _seconds(partial(continuation, TREE_TOKENS))
        drafts, accepting, n_found = [], 0.0, 0
        drafter.accept(0)  # the tree's answer goes on in another way, so that all else is asked
        tokens.append(0)
        build = _seconds(partial(drafter.draft, DRAFT_TOKENS))
        for token_id in self._text(self._random, ANSWER_TOKENS):
            tokens.append(token_id)
            accepting += _seconds(partial(drafter.accept, token_id))
            drafts.append(_seconds(partial(drafter.draft, DRAFT_TOKENS)))
            n_found += drafter.draft(DRAFT_TOKENS) is not None
        n_drafts = len(drafts)
        return Times(build, accepting / n_drafts, tuple(drafts), lookup, n_found / n_drafts)

    def _serving(self, ids: list[int]) -> KVStore:
        """A store that has served these tokens."""
        pool = BlockPool(blocks_for(len(ids), BLOCK_SIZE_TOKENS) + 1)
        store = KVStore(pool, RadixTree(pool, BLOCK_SIZE_TOKENS), BLOCK_SIZE_TOKENS)
        tokens = Tokens(ids)
        lease = store.admit(NAMESPACE, tokens)
        if isinstance(lease, Refusal):
            raise RuntimeError(f"the pool is too small for the benchmark: {lease}")
        store.extend(lease, len(tokens))
        store.publish(lease, len(tokens))
        store.donate(lease)
        return store


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(text: Text, prompt_tokens: int, repeats: int) -> Figures:
    """Generate so many sequences behind a prompt of that length."""
    workload = Workload(text, prompt_tokens)
    taken = [workload.sequence() for _ in range(repeats)]
    return Figures(
        text=text.__name__,
        prompt_tokens=prompt_tokens,
        build_milliseconds=1e3 * statistics.median(one.build for one in taken),
        accept_microseconds=1e6 * statistics.median(one.accept for one in taken),
        draft_microseconds=1e6 * statistics.median(percentile(one.drafts, 50) for one in taken),
        draft_p99_microseconds=1e6 * statistics.median(percentile(one.drafts, 99) for one in taken),
        lookup_microseconds=1e6 * statistics.median(one.lookup for one in taken),
        found_percent=100 * statistics.median(one.found for one in taken),
    )


def table(all_figures: list[Figures]) -> Table:
    columns = (
        "text",
        "prompt",
        "build ms",
        "accept us",
        "draft us",
        "p99 us",
        "lookup us",
        "found",
    )
    rows = (
        (
            figures.text,
            f"{figures.prompt_tokens:,}",
            f"{figures.build_milliseconds:.2f}",
            f"{figures.accept_microseconds:.2f}",
            f"{figures.draft_microseconds:.1f}",
            f"{figures.draft_p99_microseconds:.1f}",
            f"{figures.lookup_microseconds:.1f}",
            f"{figures.found_percent:.0f}%",
        )
        for figures in all_figures
    )
    return Table(columns, tuple(rows))


def main(
    repeats: int = 9, json_path: Annotated[Path | None, typer.Option("--json")] = None
) -> None:
    """Measure drafting behind prompts of several lengths."""
    figures = [measure(text, n, repeats) for text in TEXTS for n in PROMPT_TOKENS]
    show_figures(table(figures), figures, json_path)


if __name__ == "__main__":
    typer.run(main)
