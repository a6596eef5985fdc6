"""Drives the MLX runner by hand: tables chosen by the test, logits read from the sampler's seat."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from engine.mlx_backend.attention.strategy import Attention
from engine.mlx_backend.loader import LoadedModel
from engine.mlx_backend.runner import MlxRunner
from engine.step import Row, SampleOrder, SequenceId, StepPlan
from engine.types import SamplingParams, TokenLogprob
from kvstore.actions import CopyBlock
from kvstore.arena import Arena
from kvstore.types import BlockId
from tests.checkpoints import VOCAB_SIZE

BLOCK_SIZE = 8
N_BLOCKS = 96
Logits = npt.NDArray[np.float32]


@dataclass
class Subject:
    """A sequence under test: all its tokens, those computed so far, and its table."""

    id: SequenceId
    tokens: list[int]
    blocks: list[BlockId]
    computed_tokens: int = 0

    def row(self, n_tokens: int, sample: SampleOrder | None) -> Row:
        start = self.computed_tokens
        self.computed_tokens += n_tokens
        return Row(self.id, start, self.tokens[start : start + n_tokens], self.blocks, sample)


@dataclass
class LogitsReader:
    """A greedy sampler that keeps the logits it saw, by the order's seed."""

    seen: dict[int, Logits] = field(default_factory=dict)

    def sample(self, logits: mx.array, orders: Sequence[SampleOrder]) -> list[TokenLogprob]:
        rows = np.array(logits.astype(mx.float32))
        self.seen = {order.seed: row for order, row in zip(orders, rows, strict=True)}
        return [TokenLogprob(int(row.argmax()), 0.0) for row in rows]

    def score(self, logits: mx.array, next_tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        return [
            TokenLogprob(token, float(row[token]))
            for token, row in zip(next_tokens, logprobs, strict=True)
        ]


class Driver:
    """A runner with its arena, and subjects with shuffled tables."""

    def __init__(self, loaded: LoadedModel, attention: Attention, seed: int = 0) -> None:
        self.arena = Arena(loaded.layers, loaded.dtype, N_BLOCKS, BLOCK_SIZE)
        self.reader = LogitsReader()
        self.runner = MlxRunner(loaded.model, self.arena, attention, self.reader)
        shuffled = np.random.default_rng(seed).permutation(N_BLOCKS)
        self._free = [BlockId(int(block)) for block in shuffled]
        self._ids = 0

    def subject(self, tokens: Sequence[int], adopted: Sequence[BlockId] = ()) -> Subject:
        """A sequence of these tokens, whose first blocks are `adopted` and hold their KV."""
        self._ids += 1
        needed = -(-len(tokens) // BLOCK_SIZE) - len(adopted)
        blocks = [*adopted, *(self._free.pop() for _ in range(needed))]
        computed_tokens = len(adopted) * BLOCK_SIZE
        return Subject(SequenceId(self._ids), list(tokens), blocks, computed_tokens)

    def free_block(self) -> BlockId:
        return self._free.pop()

    def run(
        self, rows: Sequence[tuple[Subject, int]], copies: Sequence[CopyBlock] = ()
    ) -> list[Logits]:
        """Compute so many tokens of each subject in one step; logits after each one's last."""
        order = [SampleOrder(SamplingParams(temperature=0), subject.id, 0) for subject, _ in rows]
        made = [subject.row(n, sample) for (subject, n), sample in zip(rows, order, strict=True)]
        self.runner.run(StepPlan(tuple(copies), tuple(made)))
        return [self.reader.seen[subject.id] for subject, _ in rows]

    def prefill(self, subject: Subject, n_tokens: int) -> None:
        """Compute tokens of a prompt of which more is to come."""
        self.runner.run(StepPlan((), (subject.row(n_tokens, None),)))

    def logits(self, subjects: Sequence[Subject], first: Sequence[int]) -> list[Logits]:
        """Compute each subject's first tokens in one step, then one token of all at a time.

        Returns `[steps, vocabulary]` for each subject; all must have as many tokens left.
        """
        rows = list(zip(subjects, first, strict=True))
        steps = [self.run(rows)]
        while subjects[0].computed_tokens < len(subjects[0].tokens):
            steps.append(self.run([(subject, 1) for subject in subjects]))
        return [np.stack(rows) for rows in zip(*steps, strict=True)]


def random_tokens(n_tokens: int, seed: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(3, VOCAB_SIZE, n_tokens).tolist()
    return drawn


def reference(model: Module, tokens: Sequence[int]) -> Logits:
    """Logits after every token through mlx-lm's own caches, `[tokens, vocabulary]`."""
    logits = model(mx.array([list(tokens)]), cache=make_prompt_cache(model))
    return np.array(logits[0].astype(mx.float32))


def rms(found: Logits, expected: Logits) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2)))
