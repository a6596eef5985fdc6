"""Drives the MLX runner by hand: steps chosen by the test, logits read from the sampler's seat."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from engine.mlx_backend.attention.strategy import Attention
from engine.mlx_backend.runner import MlxRunner
from engine.step import Masks, Row, SampledToken, SampleOrder, SequenceId, StepPlan, no_masks
from engine.types import SamplingParams, TokenLogprob
from kvstore import invariants
from kvstore.actions import Order
from kvstore.block_pool import BlockPool
from kvstore.lease import Lease, Refusal
from kvstore.tokens import Tokens
from kvstore.types import Namespace
from tests.checkpoints import VOCAB_SIZE
from tests.offline import Room, Served, cached_model, new_store

BLOCK_SIZE = 8
ROOM = Room(n_blocks=128, block_size=BLOCK_SIZE, max_running=16, step_tokens=160)
NEAR_TIE = 1e-3
"""Logits closer than this may be ranked otherwise when other rows are computed beside them."""

Logits = npt.NDArray[np.float32]


@dataclass(eq=False)
class Subject:
    """A sequence under test: its tokens, and the lease that says how many have been computed."""

    id: SequenceId
    lease: Lease

    @property
    def tokens(self) -> Sequence[int]:
        return self.lease.tokens.ids(0, len(self.lease.tokens))

    @property
    def remaining_tokens(self) -> int:
        return len(self.lease.tokens) - self.lease.written_tokens

    def append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.lease.tokens.append(token)

    def row(self, n_tokens: int, sample: SampleOrder | None) -> Row:
        start = self.lease.written_tokens
        tokens = self.lease.tokens.ids(start, start + n_tokens)
        return Row(self.id, start, tokens, self.lease.table, sample, holds=self.lease.holds)


@dataclass
class LogitsReader:
    """A greedy sampler that keeps the logits it saw, by the order's seed."""

    seen: dict[int, Logits] = field(default_factory=dict)

    def sample(
        self, logits: mx.array, orders: Sequence[SampleOrder], masks: Masks
    ) -> list[SampledToken]:
        rows = np.array(logits.astype(mx.float32))
        self.seen = {order.seed: row for order, row in zip(orders, rows, strict=True)}
        return [SampledToken(int(row.argmax())) for row in rows]

    def score(self, logits: mx.array, next_tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        return [
            TokenLogprob(token, float(row[token]))
            for token, row in zip(next_tokens, logprobs, strict=True)
        ]


class Driver:
    """A runner and a store whose free blocks are shuffled."""

    def __init__(self, served: Served, attention: Attention, seed: int = 0) -> None:
        self.model = cached_model(served, attention, ROOM)
        self.reader = LogitsReader()
        self.runner = MlxRunner(self.model, self.reader)
        pool = BlockPool(ROOM.n_blocks)
        blocks = pool.allocate(ROOM.n_blocks)
        np.random.default_rng(seed).shuffle(blocks)
        pool.drop(blocks)
        self.store = new_store(served, ROOM, pool)
        self._ids = 0

    def subject(self, tokens: Sequence[int]) -> Subject:
        """A sequence of these tokens, which adopts what the store has of them."""
        return self._subject(self.store.admit(Namespace(), Tokens(tokens)))

    def fork(self, parent: Subject, tokens: Sequence[int], n_tokens: int) -> Subject:
        """A second sequence behind the first `n_tokens` that the parent has computed."""
        return self._subject(self.store.fork(parent.lease, Tokens(tokens), n_tokens))

    def run(self, rows: Sequence[tuple[Subject, int]]) -> list[Logits]:
        """Compute so many tokens of each subject in one step; logits after each one's last."""
        orders = [SampleOrder(SamplingParams(temperature=0), subject.id, 0) for subject, _ in rows]
        self._step([(*row, order) for row, order in zip(rows, orders, strict=True)])
        return [self.reader.seen[subject.id] for subject, _ in rows]

    def prefill(self, subject: Subject, n_tokens: int) -> None:
        """Compute tokens of a prompt of which more is to come."""
        self._step([(subject, n_tokens, None)])

    def logits(self, subjects: Sequence[Subject], lasts: int) -> list[Logits]:
        """Compute all but the last tokens of all in one step, then one token of each at a time.

        Returns the logits after the last `lasts + 1` tokens of each subject, `[.., vocabulary]`.
        """
        steps = [self.run([(subject, subject.remaining_tokens - lasts) for subject in subjects])]
        steps += [self.run([(subject, 1) for subject in subjects]) for _ in range(lasts)]
        return [np.stack(rows) for rows in zip(*steps, strict=True)]

    def orders(self, subject: Subject, n_tokens: int) -> tuple[Order, ...]:
        """What must happen before the subject's next tokens are computed."""
        orders = self.store.extend(subject.lease, n_tokens)
        assert not isinstance(orders, Refusal)
        return orders

    def _step(self, rows: Sequence[tuple[Subject, int, SampleOrder | None]]) -> None:
        orders = [order for subject, n, _ in rows for order in self.orders(subject, n)]
        plan = StepPlan(tuple(orders), tuple(subject.row(n, order) for subject, n, order in rows))
        self.runner.run(plan, no_masks)
        for subject, n_tokens, _ in rows:
            self.store.publish(subject.lease, subject.lease.written_tokens + n_tokens)
        invariants.check(self.store)

    def _subject(self, lease: Lease | Refusal) -> Subject:
        assert isinstance(lease, Lease)
        self._ids += 1
        return Subject(SequenceId(self._ids), lease)


def random_tokens(n_tokens: int, seed: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(3, VOCAB_SIZE, n_tokens).tolist()
    return drawn


def reference(model: Module, tokens: Sequence[int]) -> Logits:
    """Logits after every token through mlx-lm's own caches, `[tokens, vocabulary]`."""
    logits = model(mx.array([list(tokens)]), cache=make_prompt_cache(model))
    return np.array(logits[0].astype(mx.float32))


def shortfall(model: Module, prompt: Sequence[int], said: Sequence[int]) -> float:
    """How far a token's logit is below the best, at most, by mlx-lm after those before it."""
    logits = reference(model, [*prompt, *said])[len(prompt) - 1 : -1]
    chosen = np.take_along_axis(logits, np.array(said)[:, None], axis=1)[:, 0]
    return float((logits.max(axis=1) - chosen).max())


def expect_greedy(model: Module, prompt: Sequence[int], said: Sequence[int]) -> None:
    """Each token is the best of mlx-lm's own logits after those before it, or as good as that."""
    assert shortfall(model, prompt, said) < NEAR_TIE


def rms(found: Logits, expected: Logits) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2)))
