"""The model runner: a step's orders, prompt chunks, decodes and samples on the device."""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from engine.mlx_backend.model.cached_model import CachedModel
from engine.mlx_backend.model.forward import Piece
from engine.mlx_backend.sampling.sampler import UnusableLogits
from engine.runner import RunnerLost
from engine.step import (
    NO_MASKS,
    AskMasks,
    Masks,
    Row,
    SampledToken,
    SampleOrder,
    SequenceId,
    StepPlan,
    StepResult,
)
from engine.types import TokenLogprob

SCORED_TOKENS = 128
"""Prompt tokens scored in one forward: bounds the logits, `[tokens, vocabulary]`, in memory."""


UNUSABLE = "the model's logits leave no token to choose: not a number, or all ruled out"


class TokenSampler(Protocol):
    """Chooses tokens from logits, and scores given ones."""

    def sample(
        self, logits: mx.array, orders: Sequence[SampleOrder], masks: Masks
    ) -> list[SampledToken]:
        """One token per row of `logits`, `[rows, vocabulary]`; `masks` are those of masked rows.

        Raises UnusableLogits naming the rows that leave nothing to sample.
        """
        ...

    def score(self, logits: mx.array, next_tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        """Log-probability of `next_tokens[i]` under row `i` of `logits`, `[n, vocabulary]`."""
        ...


class MlxRunner:
    """Implements `ModelRunner` for an mlx-lm model over the engine's storage.

    Belongs to the thread that made it, as all MLX arrays do. Logits are computed only where
    somebody reads them: of the prompt chunks just the storage is evaluated, and every row that
    samples runs its last token in a forward of length 1.
    """

    def __init__(self, model: CachedModel, sampler: TokenSampler) -> None:
        self._model = model
        self._storage = model.storage
        self._sampler = sampler

    def run(self, plan: StepPlan, masks: AskMasks) -> StepResult:
        """See `ModelRunner.run`."""
        try:
            return self._run(plan, masks)
        except Exception:
            self._settle()
            raise

    def _settle(self) -> None:
        """After a failure: what was written may rest on what could not be computed."""
        try:
            mx.eval(self._storage.arrays())
        except Exception as error:
            raise RunnerLost(f"the KV cache cannot be computed: {error}") from error

    def _run(self, plan: StepPlan, masks: AskMasks) -> StepResult:
        self._storage.carry_out(plan.orders)
        scored_rows = [row for row in plan.rows if row.prompt_logprobs is not None]
        plain_rows = [row for row in plan.rows if row.prompt_logprobs is None]
        self._compute_chunks([chunk for row in plain_rows if (chunk := _chunk(row)) is not None])
        scored: dict[SequenceId, tuple[TokenLogprob, ...]] = {}
        failed: dict[SequenceId, str] = {}
        sampling: list[Row] = []
        logits: list[mx.array] = []
        for row in scored_rows:
            try:
                scored[row.sequence_id], last_logits = self._score(row)
            except UnusableLogits:
                failed[row.sequence_id] = UNUSABLE
                continue
            if row.sample is not None:
                sampling.append(row)
                logits.append(last_logits)
        decodes = sorted((row for row in plain_rows if row.sample is not None), key=_table)
        if decodes:
            logits.append(self._decode(decodes))
        sampled, unusable = self._sample([*sampling, *decodes], logits, masks)
        return StepResult(sampled, scored, failed | unusable)

    def _compute_chunks(self, chunks: Sequence[Piece]) -> None:
        for group in self._model.groups(chunks):
            self._model.forward([chunks[index] for index in group])
            mx.eval(self._storage.arrays())

    def _decode(self, rows: Sequence[Row]) -> mx.array:
        """Logits after each row's last token, `[rows, vocabulary]`."""
        logits = self._model.last_logits([_piece(row, len(row.tokens) - 1) for row in rows])
        if states := self._storage.states.unevaluated():
            mx.async_eval(logits, states)  # the logits alone do not lead to all of them
        return logits

    def _score(self, row: Row) -> tuple[tuple[TokenLogprob, ...], mx.array]:
        """Score what follows each token; also the logits after the last one, `[1, vocabulary]`."""
        found: list[TokenLogprob] = []
        logits = mx.zeros((1, 1, 1))
        for first in range(0, len(row.tokens), SCORED_TOKENS):
            logits = self._model.forward([_piece(row, first, first + SCORED_TOKENS)])
            mx.eval(logits, self._storage.arrays())
            following = row.next_tokens[first : first + SCORED_TOKENS]
            if following:
                top = row.prompt_logprobs or 0
                found += self._sampler.score(logits[0, : len(following)], following, top)
        return tuple(found), logits[:, -1]

    def _sample(
        self, rows: Sequence[Row], logits: Sequence[mx.array], masks: AskMasks
    ) -> tuple[dict[SequenceId, SampledToken], dict[SequenceId, str]]:
        """The rows' tokens, and why some rows have none; `logits` are theirs, piecewise."""
        orders = [row.sample for row in rows if row.sample is not None]
        if not orders:
            return {}, {}
        together = logits[0] if len(logits) == 1 else mx.concatenate(list(logits))
        masked = [row.sequence_id for row in rows if row.sample is not None and row.sample.masked]
        if masked:
            mx.async_eval(together)  # computes while the masks are filled
        try:
            tokens = self._sampler.sample(together, orders, masks(masked) if masked else NO_MASKS)
        except UnusableLogits as error:
            sound = [row for row in range(len(rows)) if row not in error.rows]
            failed = {rows[row].sequence_id: UNUSABLE for row in error.rows}
            rest = [together[mx.array(sound)]] if sound else []
            sampled, more = self._sample([rows[row] for row in sound], rest, masks)
            return sampled, failed | more
        found = {row.sequence_id: token for row, token in zip(rows, tokens, strict=True)}
        return found, {}


def _chunk(row: Row) -> Piece | None:
    """The row's tokens whose logits nobody reads."""
    n_tokens = len(row.tokens) if row.sample is None else len(row.tokens) - 1
    return _piece(row, 0, n_tokens) if n_tokens else None


def _piece(row: Row, first: int, end: int | None = None) -> Piece:
    """Some of a row's tokens."""
    return Piece(row.start + first, row.tokens[first:end], row.blocks, holds=row.holds)


def _table(row: Row) -> tuple[int, ...]:
    """Sorted by table, rows that share a prefix are neighbours."""
    return tuple(row.blocks)
