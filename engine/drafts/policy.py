"""Adds drafts to a step's decodes, as far as that pays, and now and then to learn what it costs.

    before a step is planned     is_due()       whether to wait for the tokens that are in flight
    while it is planned          widen()        behind decodes and prompts
    when it has been computed    verified()     of each sequence that had one

A draft goes on from a sequence's last token, so that must be known: a step with drafts is planned
when the one before has been collected, and is collected before the next is planned.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import neg

from engine.core.budget import StepBudget, StepCosts
from engine.core.request import Limits
from engine.core.sequence import LiveSequence, lease_of
from engine.core.step import VERIFICATION, chunk_work, draft_work
from engine.core.step_builder import StepBuilder
from engine.drafts.proposer import MOST_DRAFT_TOKENS
from kvstore.lease import Refusal
from kvstore.store import KVStore

_LEAST_GAIN = 1.03
"""Drafts are verified where a step then gives so many times as many tokens a second: what is known
of chances and costs is no more exact.
"""


@dataclass(frozen=True, slots=True)
class DraftableRow:
    """A row with a draft. `chances[i]`: that its first i + 1 tokens are all right, so they fall. A
    draft takes `token_seconds` for each of its tokens, and `seconds` beside these.
    """

    chances: Sequence[float]
    seconds: float
    token_seconds: float


@dataclass(frozen=True, slots=True)
class StepPrice:
    """A step without drafts gives `n_tokens` in `seconds`. Verifying any takes `verify_seconds`
    more. All drafts together may take `most_seconds` and have `most_tokens`.
    """

    n_tokens: int
    seconds: float
    verify_seconds: float
    most_seconds: float
    most_tokens: int


def allot(rows: Sequence[DraftableRow], price: StepPrice) -> list[int]:
    """For each row the number of its draft's tokens to verify; all 0 where that does not pay.

    A draft token pays where it gives more tokens a second than the step does without it. The better
    the step, the more is asked of each token: so it is asked twice.
    """
    value = price.n_tokens / price.seconds
    counts = _worth(rows, price, value)
    gained = _value(rows, price, counts)
    if gained > value:
        counts = _worth(rows, price, gained)
        gained = _value(rows, price, counts)
    return counts if gained >= _LEAST_GAIN * value else [0] * len(rows)


def _worth(rows: Sequence[DraftableRow], price: StepPrice, value: float) -> list[int]:
    """The tokens that give more than `value` tokens a second, the best first, as many as fit."""
    counts = [_n_worth(row, value) for row in rows]
    left_seconds = price.most_seconds - price.verify_seconds
    if sum(counts) <= price.most_tokens and _draft_seconds(rows, counts) <= left_seconds:
        return counts
    return _best(rows, counts, price.most_tokens, left_seconds)


def _n_worth(row: DraftableRow, value: float) -> int:
    """How many of the row's tokens pay, if they also pay for what its draft takes beside them."""
    least = value * row.token_seconds
    count = bisect_left(row.chances, -least, key=neg)
    return count if sum(row.chances[:count]) - count * least > value * row.seconds else 0


def _best(
    rows: Sequence[DraftableRow], wanted: Sequence[int], left_tokens: int, left_seconds: float
) -> list[int]:
    """Of so many tokens of each row those that give the most a second, as many as fit."""
    counts = [0] * len(rows)
    by_gain = sorted(
        (-chance / row.token_seconds, index)
        for index, row in enumerate(rows)
        for chance in row.chances[: wanted[index]]
    )
    for _, index in by_gain:
        seconds = rows[index].token_seconds + (0.0 if counts[index] else rows[index].seconds)
        if left_tokens == 0 or seconds > left_seconds:
            break
        counts[index] += 1
        left_tokens -= 1
        left_seconds -= seconds
    return counts


def _value(rows: Sequence[DraftableRow], price: StepPrice, counts: Sequence[int]) -> float:
    """Tokens a second of a step with so many draft tokens of each row."""
    if not any(counts):
        return price.n_tokens / price.seconds
    gained = sum(sum(row.chances[:count]) for row, count in zip(rows, counts, strict=True))
    seconds = price.seconds + price.verify_seconds + _draft_seconds(rows, counts)
    return (price.n_tokens + gained) / seconds


def _draft_seconds(rows: Sequence[DraftableRow], counts: Sequence[int]) -> float:
    """What so many draft tokens of each row take."""
    return sum(
        row.seconds + count * row.token_seconds
        for row, count in zip(rows, counts, strict=True)
        if count
    )


_LEAST_GAP, _MOST_GAP = 4, 512
"""Steps from one probe to the next: twice as many each time, as long as no draft pays."""

_MOST_TOKENS = 8
"""Of a probe: enough to tell what a token takes from what verifying takes."""


class Probes:
    """Keeps a cost that was learned too high once from ending all drafts: what is not done is not
    learned anew. A first step of a new shape may compile a kernel.

    A probe is a draft that would give a token more if verifying were free.
    """

    def __init__(self) -> None:
        self._gap = _LEAST_GAP
        self._left = _LEAST_GAP

    def step(self) -> None:
        """Another step is planned."""
        self._left -= self._left > 0

    def paid(self) -> None:
        """Drafts are verified because they pay."""
        self._gap = self._left = _LEAST_GAP

    def is_due(self, rows: Sequence[DraftableRow]) -> bool:
        """Whether to verify a draft of these rows, of which none pays."""
        return self._left == 0 and max(map(_gain, rows)) >= 1

    def take(self, rows: Sequence[DraftableRow], most_tokens: int) -> list[int]:
        """For each row the number of its draft's tokens to verify: a few of the likeliest one's,
        where a probe is due.
        """
        counts = [0] * len(rows)
        if self.is_due(rows):
            self._gap = self._left = min(2 * self._gap, _MOST_GAP)
            best = max(range(len(rows)), key=lambda index: _gain(rows[index]))
            counts[best] = min(len(rows[best].chances), _MOST_TOKENS, most_tokens)
        return counts


def _gain(row: DraftableRow) -> float:
    """Tokens that the first of its draft are expected to give."""
    return sum(row.chances[:_MOST_TOKENS])


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
