"""Computes the drafts of a draft model: a few tokens after those that a step has sampled."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from traceback import clear_frames
from typing import NamedTuple

import mlx.core as mx

from engine.api import one_line
from engine.core.step import (
    NO_MASKS,
    DraftNext,
    DraftPlan,
    NotDrafted,
    SampledToken,
    SequenceId,
)
from engine.mlx_backend.batch import BatchRow
from engine.mlx_backend.decode.choice import DecodePath
from engine.mlx_backend.host import is_lack_of_memory
from engine.mlx_backend.model.cached_model import CachedModel
from engine.mlx_backend.model.rows import TokenSpan
from engine.mlx_backend.model.sequences import SequenceTables
from engine.mlx_backend.sampling.edits import SamplingRow
from engine.mlx_backend.sampling.sampler import Sampler, as_list
from kvstore.ops import ReadBlock

logger = logging.getLogger(__name__)


class SampledRow(NamedTuple):
    """The tokens that a step has sampled for a sequence, and its sampling state after them."""

    tokens: Sequence[SampledToken]
    sampling: SamplingRow

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


class _Row(NamedTuple):
    """A row that is continued, and the position after the tokens of its first forward."""

    plan: DraftNext
    batch: BatchRow
    stop: int


class DraftRunner:
    """A draft model over storage of its own. Belongs to the thread of the runner.

    A draft's token is drawn as the sequence's own token at that index of its output would be, from
    the draft model's logits: with the same seed, so that two models that agree draw the same. Its
    penalties, bans and biases are those after the last sampled token.
    """

    def __init__(
        self,
        model: CachedModel,
        sampler: Sampler,
        vocab_size: int,
        decode: DecodePath | None = None,
    ) -> None:
        """`vocab_size`: of the logits that the sampler draws from, those of the target model.
        `decode`: how forwards of one token a row are computed; None: eagerly.
        """
        self._model = model
        self._decode = decode
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._tables: dict[SequenceId, SequenceTables] = {}
        self._drafted: list[tuple[Sequence[_Row], mx.array]] = []  # tokens by forward, `[rows]`
        self._computed: list[SequenceId] = []
        self._has_failed = False

    def _change(self, plan: DraftPlan) -> None:
        """Drop the tables of sequences that leave, and patch the others."""
        for sequence_id in plan.leave:
            self._tables.pop(sequence_id, None)
        for sequence_id, patch in plan.patches:
            if sequence_id not in self._tables:
                self._tables[sequence_id] = SequenceTables(self._model.n_groups)
            self._tables[sequence_id].patch(patch)

    def draft(
        self,
        plan: DraftPlan,
        sampled: Mapping[SequenceId, SampledRow],
        launch: Callable[[Iterator[list[mx.array]]], None],
    ) -> Mapping[SequenceId, tuple[int, ...]] | NotDrafted:
        """The draft of each sequence that is computed. `launch` computes arrays one after another,
        each before it takes the next. Where the model fails, the step is as good without.
        """
        if self._has_failed:
            return NotDrafted.FAILED
        self._change(plan)
        try:
            launch(self._forwards(plan, sampled))
            return self._read()
        except Exception as error:  # a model may raise anything
            self._drafted, self._computed = [], []
            if is_lack_of_memory(error) and self._renew_storage(error):
                logger.warning("the draft model lacks memory, and rests: %s", one_line(error))
                return NotDrafted.NO_MEMORY
            logger.exception("the draft model has failed: nothing is drafted by it any more")
            self._has_failed = True
            return NotDrafted.FAILED

    def _renew_storage(self, error: Exception) -> bool:
        """Begin with an empty storage, since what it held may depend on what has failed. Returns
        whether there is memory for it.
        """
        clear_frames(error.__traceback__)  # which refer to what has been computed
        try:
            self._model.storage.renew()
        except Exception:  # MLX may raise anything
            return False
        return True

    def _forwards(
        self, plan: DraftPlan, sampled: Mapping[SequenceId, SampledRow]
    ) -> Iterator[list[mx.array]]:
        """Build the forwards of a plan, each to be launched before the next is built. A row that is
        to be continued and has sampled nothing is left out.
        """
        self._drafted, self._computed = [], []
        ops = [op for _, op in plan.ops if not isinstance(op, ReadBlock)]
        for read in self._model.storage.execute(ops):
            mx.eval(read)
        spans, token_ids, rows = list[TokenSpan](), list[int](), dict[int, _Row]()
        for each in plan.rows:
            own = sampled.get(each.sequence_id)
            if each.n_draft and (own is None or not own.tokens):
                continue
            start, tokens = each.start, list(each.tokens)
            if each.n_draft and own is not None:
                n_kept = 0 if tokens else _n_kept(each.ahead, own.token_ids)
                start, tokens = start + n_kept, [*tokens, *own.token_ids[n_kept:]]
                rows[len(spans)] = self._row(each, own.sampling, start + len(tokens))
            self._computed.append(each.sequence_id)
            n_read = int(each.n_draft > 0)
            spans.append(self._span(each, start, len(tokens), len(spans), len(token_ids), n_read))
            token_ids += tokens
        if not spans:
            return
        # Those that are continued longest first: the rows of later forwards are the first of these.
        continued = sorted(rows, key=lambda index: -rows[index].plan.n_draft)
        logits: list[mx.array] = []
        order: list[int] = []
        yield from self._first_forwards(spans, self._inputs(mx.array(token_ids)), logits, order)
        if not continued:
            return
        left, last = [rows[index] for index in continued], _in_order(logits, order, continued)
        logits.clear()
        for n_done in range(left[0].plan.n_draft):
            if n_done:
                left = [row for row in left if row.plan.n_draft > n_done]
                last, fences = self._next_logits(left, n_done)
                yield fences
            drawn = self._draw(left, last)
            self._drafted.append((left, drawn))
            yield [drawn]

    def _read(self) -> dict[SequenceId, tuple[int, ...]]:
        """The draft of each sequence that was computed. Waits for all that was launched, also where
        nothing is drafted: else known tokens would take the time of the next step, or fail it.
        """
        found: dict[SequenceId, tuple[int, ...]] = dict.fromkeys(self._computed, ())
        if self._drafted:  # which comes last
            mx.eval([tokens for _, tokens in self._drafted])
        else:
            mx.eval(self._model.storage.fences())
        for rows, tokens in self._drafted:
            for row, token_id in zip(rows, as_list(tokens), strict=False):
                found[row.plan.sequence_id] += (token_id,)
        self._drafted, self._computed = [], []
        return found

    def _first_forwards(
        self,
        spans: Sequence[TokenSpan],
        token_ids: mx.array,
        logits: list[mx.array],
        order: list[int],
    ) -> Iterator[list[mx.array]]:
        """Forwards of the tokens that the model lacks. Adds the logits of the last ones, and the
        indices of their spans.
        """
        self._model.storage.states.begin_step()
        forwards = self._model.arrange(spans)
        for batch in forwards.prompts:
            yield self._model.forward(batch, token_ids).fences
        for batch in forwards.sampling:
            computed = self._model.forward(batch, token_ids)
            order += [span.index for span in batch.spans if span.n_read]
            logits.append(computed.logits)
            yield [computed.logits, *computed.fences]

    def _next_logits(self, rows: Sequence[_Row], n_done: int) -> tuple[mx.array, list[mx.array]]:
        """The logits after the token that was drawn last for each row, `[lines, vocabulary]`, whose
        first lines are the rows', and the arrays to evaluate.
        """
        token_ids = self._inputs(self._drafted[-1][1][: len(rows)])
        if self._decode is not None and (compiled := self._decode.compiled) is not None:
            for row in rows:
                row.batch.position = row.stop + n_done - 1
            compiled_logits = compiled.forward(
                [row.batch for row in rows],
                lambda lines: mx.pad(token_ids.astype(mx.uint32), (0, lines - len(rows))),
            )
            if compiled_logits is not None:
                return compiled_logits, [compiled_logits]
        spans = [
            self._span(row.plan, row.stop + n_done - 1, 1, index, index, 1)
            for index, row in enumerate(rows)
        ]
        parts, order, fences = list[mx.array](), list[int](), list[mx.array]()
        for arrays in self._first_forwards(spans, token_ids, parts, order):
            fences += arrays
        return _in_order(parts, order, range(len(rows))), fences

    def _span(
        self, row: DraftNext, start: int, n_tokens: int, index: int, first: int, n_read: int
    ) -> TokenSpan:
        tables = self._tables[row.sequence_id]
        return TokenSpan.of(tables, start, n_tokens, index, first, n_read)

    def _row(self, plan: DraftNext, sampling: SamplingRow, stop: int) -> _Row:
        tables = self._tables[plan.sequence_id]
        return _Row(plan, BatchRow(plan.sequence_id, 0, tables, sampling.for_drafts()), stop)

    def _inputs(self, token_ids: mx.array) -> mx.array:
        """Token ids for the model's embedding, which may have fewer rows than the target's."""
        return mx.minimum(token_ids.astype(mx.int32), self._model.layout.vocab_size - 1)

    def _draw(self, rows: Sequence[_Row], logits: mx.array) -> mx.array:
        """The token that each row would draw from these logits, uint32 `[lines]`."""
        missing = self._vocab_size - logits.shape[-1]
        if missing > 0:
            logits = mx.pad(logits, [(0, 0), (0, missing)], constant_values=-math.inf)
        elif missing < 0:
            logits = logits[:, : self._vocab_size]
        states = [row.batch.sampling for row in rows]
        drawn = self._sampler.sample(logits, states, NO_MASKS, ())
        for state in states:
            state.output_index += 1
        return drawn.tokens


def _in_order(parts: Sequence[mx.array], order: Sequence[int], wanted: Sequence[int]) -> mx.array:
    """The rows of these arrays together, which are those of the indices `order`, as `wanted`."""
    joined = parts[0] if len(parts) == 1 else mx.concatenate(list(parts))
    places = [order.index(index) for index in wanted]
    return joined if places == list(range(len(joined))) else joined[mx.array(places)]


def _n_kept(ahead: Sequence[int], sampled: Sequence[int]) -> int:
    """How many of the sampled tokens the model has KV of, less the last, whose logits it needs."""
    n_most = min(len(ahead), len(sampled) - 1)
    return next((i for i in range(n_most) if ahead[i] != sampled[i]), n_most)
