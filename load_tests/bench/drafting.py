"""What drafting costs: `python -m load_tests.bench.drafting [--json PATH]`. No model, no tensors.

A sequence generates tokens after prompts of several lengths, and makes a draft before each token.
Texts are runs that repeat, as in code and JSON, or unrelated tokens, for which all sources are
tried in vain. Remembered answers are of the same kind, as many as fit. The prefix cache has the
prompt and another answer to it, so it is looked up again and again. Build is the first draft.
Accept compares a token with the draft. Lookup is the prefix cache alone, for 512 tokens. Figures
are medians of the sequences' own medians.
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

from engine.drafts.proposer import Proposer, first_rates
from engine.drafts.sources import MAX_ANSWER_TOKENS, TREE_TOKENS, Answers, Drafter
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
    """Seconds of one sequence."""

    build: float
    accept: float
    drafts: tuple[float, ...]
    lookup: float
    found: float
    """The share of tokens for which there was a draft."""


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
    """A prefix cache and answers as a daemon has them, and sequences of one kind of text."""

    def __init__(self, text: Text, prompt_tokens: int) -> None:
        self._random = random.Random(1)
        self._text = text
        self._prompt = text(self._random, prompt_tokens)
        self._store = self._serving([*self._prompt, *text(self._random, ANSWER_TOKENS)])
        self._answers = Answers()
        for _ in range(MAX_ANSWER_TOKENS // ANSWER_TOKENS):
            self._answers.add(NAMESPACE, text(self._random, ANSWER_TOKENS))
        self._answers.propose(NAMESPACE, self._prompt, 1)  # what was added is indexed now

    def sequence(self) -> Times:
        """Generate an answer after the prompt."""
        tokens = Tokens(self._prompt)
        continuation = partial(self._store.continuation, NAMESPACE, tokens)
        answers = partial(self._answers.propose, NAMESPACE)
        drafter = Drafter(SortedText(self._prompt), (), continuation, answers)
        proposer = Proposer(drafter.draft, first_rates())
        lookup = _seconds(partial(continuation, TREE_TOKENS))
        drafts, accepting, n_found = [], 0.0, 0
        proposer.accept(0)  # the tree's answer is another, so all other sources are tried
        tokens.append(0)
        build = _seconds(partial(proposer.draft, DRAFT_TOKENS))
        for token_id in self._text(self._random, ANSWER_TOKENS):
            tokens.append(token_id)
            accepting += _seconds(partial(proposer.accept, token_id))
            drafts.append(_seconds(partial(proposer.draft, DRAFT_TOKENS)))
            n_found += proposer.draft(DRAFT_TOKENS) is not None
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
        store.plan(lease, len(tokens))
        store.commit(lease, len(tokens))
        store.donate(lease)
        return store


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(text: Text, prompt_tokens: int, repeats: int) -> Figures:
    """Generate `repeats` sequences after a prompt of that length."""
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
    """Measure drafting after prompts of several lengths."""
    figures = [measure(text, n, repeats) for text in TEXTS for n in PROMPT_TOKENS]
    show_figures(table(figures), figures, json_path)


if __name__ == "__main__":
    typer.run(main)
