"""Adds drafts to a step's decodes, as far as that pays, and now and then to learn what it costs.

    before a step is planned     is_due()       whether to wait for the tokens that are in flight
    while it is planned          widen()        behind decodes and prompts
    when it has been computed    verified()     of each sequence that had one

A draft goes on from a sequence's last token, so that must be known: a step with drafts is planned
when the one before has been collected, and is collected before the next is planned.
"""

from collections.abc import Iterable, Sequence

from engine.drafts.acceptance import MOST_DRAFT_TOKENS
from engine.drafts.allotment import DraftableRow, StepPrice, allot
from engine.drafts.probes import Probes
from engine.scheduling.costs import StepCosts
from engine.scheduling.sequence import LiveSequence, lease_of
from engine.scheduling.step_budget import StepBudget
from engine.scheduling.step_builder import StepBuilder
from engine.scheduling.validation import Limits
from engine.step.plan import VERIFICATION, chunk_work, draft_work
from kvstore.lease import Refusal
from kvstore.store import KVStore

_LEAST_SECONDS = 1e-9
"""Keeps divisions sound where costs were learned to be nothing."""


class Drafting:
    """Plans the drafts of a scheduler's steps. `costs` are what these steps have taught."""

    def __init__(self, store: KVStore, costs: StepCosts, limits: Limits) -> None:
        self._store = store
        self._costs = costs
        self._limits = limits
        self._probes = Probes()

    def is_due(self, running: Iterable[LiveSequence]) -> bool:
        """Whether drafts of the next step would pay for waiting until all tokens are known, or are
        to be tried.
        """
        decodes = [sequence for sequence in running if sequence.remaining_tokens == 1]
        expected = [
            (sequence, chances)
            for sequence in decodes
            if sequence.in_flight_outputs
            and (chances := _chances(sequence, sequence.in_flight_outputs))
        ]
        if not expected:
            return False
        time = StepBudget(self._costs, self._limits.step_stretch, len(decodes))
        for sequence in decodes:
            time.decode(sequence.planned_tokens)
        rows = [self._row(sequence.planned_tokens, chances) for sequence, chances in expected]
        price = self._price(time, self._limits.step_tokens - len(decodes))
        return any(allot(rows, price)) or self._probes.is_due(rows)

    def widen(self, builder: StepBuilder, sequences: Iterable[LiveSequence]) -> None:
        """Let those of the step's decodes whose tokens are known verify drafts behind these.
        Nothing of them is in flight: what is taken in next is what became of the draft.

        They take what time and tokens are left, and blocks that nobody else uses.
        """
        self._probes.step()
        if not builder.decodes or builder.is_short_of_blocks:
            return
        decodes = set(builder.decodes)
        expected = [
            (sequence, chances)
            for sequence in sequences
            if sequence.id in decodes
            and sequence.computed_tokens + 1 == sequence.planned_tokens == len(sequence.tokens)
            and (chances := _chances(sequence, 0))
        ]
        if not expected:
            return
        rows = [self._row(one.planned_tokens - 1, chances) for one, chances in expected]
        counts = allot(rows, self._price(builder.time, builder.budget_tokens))
        if any(counts):
            self._probes.paid()
        else:
            counts = self._probes.take(rows, builder.budget_tokens)
        for (sequence, _), most in zip(expected, counts, strict=True):
            if most:
                self._draft(builder, sequence, most)

    def _draft(self, builder: StepBuilder, sequence: LiveSequence, most: int) -> None:
        if sequence.unanswered is not None and not self._store.rewinds:
            return  # it may keep its logits: then it cannot go back to before these
        draft = sequence.speculation.draft(most)
        if draft is None or max(draft.tokens) >= self._limits.vocab_size:
            return  # a grammar may know tokens that the model does not have
        lease = lease_of(sequence)
        n_tokens = self._store.max_step_tokens(lease, len(draft.tokens))
        if n_tokens < 1:
            return  # a window's room ends with the step's own token
        step_ops = self._store.extend_by_draft(lease, n_tokens)
        if not isinstance(step_ops, Refusal):
            builder.draft(sequence, draft.shortened(n_tokens), step_ops)

    def _price(self, time: StepBudget, most_tokens: int) -> StepPrice:
        """Of drafts beside what has been planned."""
        decodes = time.decodes
        return StepPrice(
            n_tokens=decodes.decode_rows,
            seconds=max(self._costs.seconds(decodes), _LEAST_SECONDS),
            verify_seconds=self._costs.seconds(VERIFICATION),
            most_seconds=time.left_seconds,
            most_tokens=most_tokens,
        )

    def _row(self, start: int, chances: Sequence[float]) -> DraftableRow:
        """A sequence that decodes the token at position `start`."""
        seconds = self._costs.seconds(draft_work(start, 0))
        token_seconds = self._costs.seconds(draft_work(start, 1)) - seconds
        return DraftableRow(
            chances=chances,
            seconds=max(seconds, 0.0) + self._again_seconds(start, chances),
            token_seconds=max(token_seconds, _LEAST_SECONDS),
        )

    def _again_seconds(self, start: int, chances: Sequence[float]) -> float:
        """What it takes to compute the right ones of a draft again, where some are wrong and the
        sequence has to go back to before all of them.
        """
        if self._store.rewinds:
            return 0.0
        return (1 - chances[-1]) * self._costs.seconds(chunk_work(start, 1 + len(chances) // 2))


def _chances(sequence: LiveSequence, ahead: int) -> Sequence[float]:
    """Of the sequence's next tokens, behind `ahead` that are not known yet."""
    most = min(sequence.lacks_tokens - ahead - 1, MOST_DRAFT_TOKENS)
    return sequence.speculation.chances(ahead, most) if most > 0 else ()
