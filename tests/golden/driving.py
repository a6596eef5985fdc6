"""Drives the MLX runner by hand: a test chooses steps, and reads what the sampler is given."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from engine.core.step import (
    NO_STEP_MASKS,
    BatchEntry,
    Masks,
    ModelRunner,
    Prefill,
    RowResult,
    Sampled,
    SampledToken,
    Sampling,
    SequenceId,
    StepMasks,
    StepPlan,
    StepResult,
)
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.runner import Launch, MlxRunner
from engine.mlx_backend.sampling.edits import SamplingRow
from engine.mlx_backend.sampling.sampler import Drawn, Sampler
from engine.values.request import SamplingParams
from kvstore import invariants
from kvstore.lease import Lease, Refusal
from kvstore.pool import BlockPool
from kvstore.tokens import Tokens
from kvstore.types import Namespace
from measuring.random_checkpoint import VOCAB_SIZE
from tests.devices import SERVING_LAUNCH, tolerance
from tests.offline import Room as EngineRoom
from tests.offline import Served, cached_model, new_store
from tests.stored_peer import stores_in_format

BLOCK_SIZE = 8
ROOM = EngineRoom(n_blocks=128, block_size=BLOCK_SIZE, max_running=16, step_tokens=160)
NEAR_TIE = tolerance(1e-3)
"""Logits closer than this may be ranked otherwise when other rows are computed beside them."""

STORED_TIMES = 100
"""How much more logits may differ where K and V are not stored as they are computed: a number that
differs in its last bits may be rounded to the next code, and numbers of later layers after it.
"""

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

    def prefill(self, n_tokens: int, samples: bool) -> Prefill:
        start = self.lease.written_tokens
        tokens = tuple(self.lease.tokens.ids(start, start + n_tokens))
        return Prefill(self.id, start, tokens, samples)


class LogitsReader(Sampler):
    """A sampler that keeps the logits it saw last, by the rows' seeds."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE)
        self.seen: dict[int | None, Logits] = {}

    def sample(
        self, logits: mx.array, rows: Sequence[SamplingRow], masks: Masks, masked: Sequence[int]
    ) -> Drawn:
        found = np.array(logits.astype(mx.float32))
        self.seen = {row.params.seed: own for row, own in zip(rows, found, strict=True)}
        return super().sample(logits, rows, masks, masked)


class Driver:
    """A runner and a store whose free blocks are shuffled."""

    def __init__(
        self,
        served: Served,
        attention: Attention,
        seed: int = 0,
        launch: Launch = SERVING_LAUNCH,
        room: EngineRoom = ROOM,
    ) -> None:
        self.model = cached_model(served, attention, room)
        self.reader = LogitsReader()
        self.runner = MlxRunner(self.model, self.reader, launch)
        pool = BlockPool(room.n_blocks)
        blocks = pool.allocate(room.n_blocks)
        np.random.default_rng(seed).shuffle(blocks)
        pool.release(blocks)
        self.store = new_store(served, room, pool)
        self._entering: list[BatchEntry] = []
        self._ids = 0

    def subject(
        self, tokens: Sequence[int], adapter: str = "", sampling: Sampling | None = None
    ) -> Subject:
        """A sequence of these tokens, which adopts what the store has of them; greedy by itself."""
        namespace = Namespace(adapter=adapter)
        return self._subject(self.store.admit(namespace, Tokens(tokens)), adapter, sampling)

    def fork(self, parent: Subject, tokens: Sequence[int], n_tokens: int) -> Subject:
        """A second sequence behind the first `n_tokens` that the parent has computed."""
        return self._subject(self.store.fork(parent.lease, Tokens(tokens), n_tokens))

    def run(self, rows: Sequence[tuple[Subject, int]]) -> list[Logits]:
        """Compute so many tokens of each subject in one step; logits after each one's last."""
        self.step([subject.prefill(n_tokens, samples=True) for subject, n_tokens in rows], rows)
        return [self.reader.seen[subject.id] for subject, _ in rows]

    def prefill(self, subject: Subject, n_tokens: int) -> None:
        """Compute tokens of a prompt of which more is to come."""
        self.step([subject.prefill(n_tokens, samples=False)], [(subject, n_tokens)])

    def logits(self, subjects: Sequence[Subject], lasts: int) -> list[Logits]:
        """Compute all but the last tokens of all in one step, then one token of each at a time.

        Returns the logits after the last `lasts + 1` tokens of each subject, `[.., vocabulary]`.
        """
        steps = [self.run([(subject, subject.remaining_tokens - lasts) for subject in subjects])]
        steps += [self.run([(subject, 1) for subject in subjects]) for _ in range(lasts)]
        return [np.stack(rows) for rows in zip(*steps, strict=True)]

    def step(self, prefills: Sequence[Prefill], rows: Sequence[tuple[Subject, int]]) -> StepResult:
        """Compute the prefills, which are those rows."""
        result = compute(self.runner, replace(self.plan(rows), rows=list(prefills)))
        for subject, n_tokens in rows:
            self.store.commit(subject.lease, n_tokens)
        invariants.check(self.store)
        return result

    def plan(self, rows: Sequence[tuple[Subject, int]]) -> StepPlan:
        """A step in which so many tokens of each subject find room; it computes none yet."""
        for subject, n_tokens in rows:
            assert self.store.plan(subject.lease, n_tokens) is None
        entering, self._entering = self._entering, []
        return StepPlan(
            enter=entering,
            patches=[
                (subject.id, patch) for subject, _ in rows for patch in subject.lease.take_patches()
            ],
            ops=self.store.take_ops(),
        )

    def _subject(
        self, lease: Lease | Refusal, adapter: str = "", sampling: Sampling | None = None
    ) -> Subject:
        assert isinstance(lease, Lease)
        self._ids += 1
        name = SequenceId(self._ids)
        greedy = Sampling(SamplingParams(temperature=0, seed=name), seed=name)
        self._entering.append(BatchEntry(name, sampling or greedy, adapter))
        return Subject(name, lease)


def compute(runner: ModelRunner, plan: StepPlan, masks: StepMasks = NO_STEP_MASKS) -> StepResult:
    """One step, with none in flight."""
    runner.submit(plan)
    runner.launch()
    runner.draw(masks)
    return runner.collect()


def compute_one(runner: ModelRunner, plan: StepPlan) -> RowResult:
    """The result of the only row of a step."""
    [result] = compute(runner, plan).rows
    return result


def sampled_token(result: RowResult) -> SampledToken:
    """The token that a row has sampled."""
    assert isinstance(result, Sampled)
    return result.token


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
    assert shortfall(model, prompt, said) < allowed(NEAR_TIE, model)


def allowed(difference: float, model: Module) -> float:
    """The largest difference from the logits of mlx-lm's `model`, where this one is allowed if K
    and V are stored as they are computed.
    """
    return difference * (STORED_TIMES if stores_in_format(model) else 1)


def rms(found: Logits, expected: Logits) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2)))
