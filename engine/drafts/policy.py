"""Decides which drafts to verify: drafts that give more tokens a second, and sometimes one to learn
their cost.

A draft continues the last token of its sequence, which must be known. So a step with drafts never
overlaps with the steps before and after it: each is collected before the next is planned.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import partial
from operator import neg
from typing import TYPE_CHECKING, NamedTuple

from engine.core.budget import StepBudget, StepCosts
from engine.core.sequence import LiveSequence
from engine.core.step import Decode, Late, Verify
from engine.drafts.proposer import MAX_BACKOFF, MAX_DRAFT_TOKENS, Proposer, first_rates
from engine.drafts.sources import Answers, Draft, Drafter, Forced
from engine.drafts.suffix_index import RequestTexts
from kvstore.store import KVStore
from kvstore.tokens import Tokens
from kvstore.types import Namespace

if TYPE_CHECKING:
    from engine.core.request import Limits
    from engine.core.sequence import Step

_MIN_GAIN = 1.03
"""Drafts must multiply a step's tokens a second by this, since estimates are not exact."""


class DraftableRow(NamedTuple):
    """A row with a draft. `chances[i]` is the chance that its first i + 1 tokens are right, so
    chances fall. Verifying takes `token_seconds` for each token and `seconds` in addition.
    """

    chances: Sequence[float]
    seconds: float
    token_seconds: float


class StepPrice(NamedTuple):
    """The cost of a step. Without drafts it gives `n_tokens` in `seconds`. Verifying drafts takes
    `verify_seconds` more. All drafts together may take `most_seconds` and have `most_tokens`.
    """

    n_tokens: int
    seconds: float
    verify_seconds: float
    most_seconds: float
    most_tokens: int


def allot(rows: Sequence[DraftableRow], price: StepPrice) -> list[int]:
    """Return for each row how many tokens of its draft to verify; all 0 if drafts do not pay.

    A draft token pays if it gives more tokens a second than the step does without it. The chosen
    tokens raise the step's rate, so the choice is made again with the higher rate.
    """
    value = price.n_tokens / price.seconds
    counts, gained = _choose(rows, price, value)
    if gained > value:
        counts, gained = _choose(rows, price, gained)
    return counts if gained >= _MIN_GAIN * value else [0] * len(rows)


def _choose(
    rows: Sequence[DraftableRow], price: StepPrice, value: float
) -> tuple[list[int], float]:
    """Choose for each row how many tokens to verify: as many as fit, best first, that give more
    than `value` tokens a second. Return the counts and the tokens a second of the step.
    """
    counts = [_n_worth(row, value) for row in rows]
    left_seconds = price.most_seconds - price.verify_seconds
    tokens, seconds = _totals(rows, counts)
    if sum(counts) > price.most_tokens or seconds > left_seconds:
        counts = _best(rows, counts, price.most_tokens, left_seconds)
        tokens, seconds = _totals(rows, counts)
    if not any(counts):
        return counts, price.n_tokens / price.seconds
    seconds += price.seconds + price.verify_seconds
    return counts, (price.n_tokens + tokens) / seconds


def _n_worth(row: DraftableRow, value: float) -> int:
    """Count the row's tokens that pay; 0 if together they do not pay for `row.seconds` as well."""
    least = value * row.token_seconds
    count = bisect_left(row.chances, -least, key=neg)
    return count if sum(row.chances[:count]) - count * least > value * row.seconds else 0


def _best(
    rows: Sequence[DraftableRow], wanted: Sequence[int], left_tokens: int, left_seconds: float
) -> list[int]:
    """Choose among the wanted tokens the ones that give the most a second, as many as fit."""
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


def _totals(rows: Sequence[DraftableRow], counts: Sequence[int]) -> tuple[float, float]:
    """The expected tokens and the seconds of these counts of draft tokens."""
    tokens = seconds = 0.0
    for row, count in zip(rows, counts, strict=True):
        if count:
            tokens += sum(row.chances[:count])
            seconds += row.seconds + count * row.token_seconds
    return tokens, seconds


_MIN_GAP, _MAX_GAP = 4, 512
"""Steps from one probe to the next. The gap doubles with each probe until a draft pays."""

_PROBE_TOKENS = 8
"""The most draft tokens of a probe: enough to learn the cost of a token and that of verifying."""


class Probes:
    """Sometimes verifies a draft that does not pay, if it is expected to give a token.

    Otherwise a cost that was once learned too high would end all drafts for good: in the first step
    of a new shape a kernel may be compiled.
    """

    def __init__(self) -> None:
        self._gap = self._left_steps = _MIN_GAP

    def count_step(self) -> None:
        """Count a planned step."""
        self._left_steps = max(self._left_steps - 1, 0)

    def paid(self) -> None:
        """Start again with the smallest gap, because drafts pay."""
        self._gap = self._left_steps = _MIN_GAP

    def is_due(self, rows: Sequence[DraftableRow]) -> bool:
        """Whether to verify a draft of these rows, none of which pays."""
        return self._left_steps == 0 and max(map(_gain, rows)) >= 1

    def take(self, rows: Sequence[DraftableRow], most_tokens: int) -> list[int]:
        """Return for each row how many tokens to verify: some of the best row if a probe is due."""
        counts = [0] * len(rows)
        if self.is_due(rows):
            self._gap = self._left_steps = min(2 * self._gap, _MAX_GAP)
            best = max(range(len(rows)), key=lambda index: _gain(rows[index]))
            counts[best] = min(len(rows[best].chances), _PROBE_TOKENS, most_tokens)
        return counts


def _gain(row: DraftableRow) -> float:
    """The number of tokens that a probe of the row is expected to give."""
    return sum(row.chances[:_PROBE_TOKENS])


_MIN_SECONDS = 1e-9  # a divisor for costs that were learned to be 0

MAX_ATTEMPTS = 8
"""The most drafts that are made for one step, each in 0.1 to 0.3 ms. Sequences take turns."""


class DraftPolicy:
    """Begins a proposer for each sequence, and adds the drafts that pay to the scheduler's steps.
    A sequence whose proposer has raised is not drafted for; it is in `failures` with the error,
    until the scheduler ends it. Engine thread only.
    """

    def __init__(self, store: KVStore) -> None:
        self.failures: dict[LiveSequence, BaseException] = {}
        self._store = store
        self._answers = Answers()
        self._rates = first_rates()
        self._probes = Probes()
        self._left_attempts = MAX_ATTEMPTS  # of this step
        self._n_attempts = 0

    def begin(
        self, texts: RequestTexts, namespace: Namespace, tokens: Tokens, forced: Forced | None
    ) -> Proposer | None:
        """Return a new sequence's proposer, or None if nothing is to be drafted for it. `texts` are
        its request's, and `tokens` its own, so far only the prompt. `forced` is None without a
        grammar.
        """
        drafter = Drafter(
            texts,
            partial(self._store.continuation, namespace, tokens),
            partial(self._answers.propose, namespace),
            forced,
        )
        max_backoff = MAX_BACKOFF if forced is None else 0  # forced tokens come and go
        return Proposer(drafter.draft, self._rates, max_backoff)

    def ended(self, namespace: Namespace, tokens: Tokens, prompt_tokens: int) -> None:
        """Remember the output of a finished sequence."""
        self._answers.add(namespace, tokens.packed(prompt_tokens, len(tokens)))

    def clear(self, namespace: Namespace | None = None) -> None:
        """Forget the outputs of one namespace, or all."""
        self._answers.clear(namespace)

    def prefers_sync(
        self, decoding: Iterable[LiveSequence], costs: StepCosts, limits: "Limits"
    ) -> bool:
        """Whether drafts of the next step are predicted to gain more than overlapping it with the
        step in flight, or a probe is due. `decoding` are the sequences that decode.
        """
        drafting = [
            (sequence, proposer, n_unknown)
            for sequence in decoding
            if (proposer := sequence.proposer) is not None
            and not proposer.backoff_tokens
            and (n_unknown := _n_unknown(sequence)) > 0
            and _most_tokens(sequence, n_unknown) > 0
        ]
        if not drafting:
            return False
        self._attempt_due([(sequence, proposer) for sequence, proposer, _ in drafting])
        expected = [
            (sequence, chances)
            for sequence, proposer, n_unknown in drafting
            if (chances := self._chances(sequence, proposer, n_unknown))
        ]
        if not expected:
            return False
        starts = [one.planned_tokens for one in decoding if _n_unknown(one) >= 0]
        budget = StepBudget(costs, limits.step_stretch, len(starts))
        budget.add_decodes(len(starts), sum(starts) + len(starts))
        rows = [self._row(sequence.planned_tokens, each, costs) for sequence, each in expected]
        price = _price(budget, costs, limits.step_tokens - len(starts))
        return any(allot(rows, price)) or self._probes.is_due(rows)

    def add(self, step: "Step", costs: StepCosts, limits: "Limits") -> None:
        """Turn decodes of the step into rows that verify drafts, if these pay or a probe is due.

        Drafts use the rest of the step's time and tokens, and free blocks. They follow known
        tokens, so no sequence with a draft is in flight.
        """
        self._probes.count_step()
        self._answers.catch_up()
        if not step.is_short_of_blocks:
            self._verify(step, costs, limits)
        self._left_attempts = MAX_ATTEMPTS

    def _verify(self, step: "Step", costs: StepCosts, limits: "Limits") -> None:
        """Turn decodes of the step into rows that verify drafts. See `add`."""
        drafting = [
            (index, sequence, lease, proposer)
            for index, (sequence, lease, row) in enumerate(step.rows)
            if (proposer := sequence.proposer) is not None
            and not proposer.backoff_tokens
            and type(row) is Decode
            and lease.written_tokens + 1 == lease.planned_tokens == len(sequence.tokens)
            and _most_tokens(sequence, 0) > 0
        ]
        if not drafting:
            return
        self._attempt_due([(sequence, proposer) for _, sequence, _, proposer in drafting])
        expected = [
            (index, lease, proposer, chances)
            for index, sequence, lease, proposer in drafting
            if (chances := self._chances(sequence, proposer, 0))
        ]
        if not expected:
            return
        rows = [self._row(lease.planned_tokens - 1, each, costs) for _, lease, _, each in expected]
        counts = allot(rows, _price(step.budget, costs, step.budget_tokens))
        if any(counts):
            self._probes.paid()
        else:
            counts = self._probes.take(rows, step.budget_tokens)
        for (index, lease, proposer, _), count in zip(expected, counts, strict=True):
            sequence = step.rows[index].sequence
            if not count or (sequence.unanswered is not None and not self._store.can_truncate):
                continue  # if its logits are saved, it cannot return to before these tokens
            draft = self._draft(sequence, proposer, count)
            if draft is None or max(draft.tokens) >= limits.vocab_size:
                continue  # a grammar may have tokens that the model does not have
            # One less: a draft may be rejected, so it ends before a state is to be saved.
            n_tokens = lease.max_step_tokens(len(draft.tokens) + 1) - 1
            if n_tokens < 1:
                continue
            start = lease.planned_tokens - 1
            if self._store.plan_draft(lease, n_tokens) is None:
                sequence.draft_source = draft.source
                token, tokens = sequence.tokens[start], draft.tokens[:n_tokens]
                step.verify(index, Verify(sequence.id, start, token, tokens))

    def _attempt_due(self, drafting: Sequence[tuple[LiveSequence, Proposer]]) -> None:
        """Make drafts for the sequences that have none, as many as the step may still have. The
        first of the others has its turn in the next step.
        """
        due = [each for each in drafting if each[1].is_due and each[0] not in self.failures]
        if len(due) > self._left_attempts:
            first = self._n_attempts % len(due)
            due = [*due[first:], *due[:first]][: self._left_attempts]
        for sequence, proposer in due:
            self._attempt(sequence, proposer)

    def _attempt(self, sequence: LiveSequence, proposer: Proposer) -> None:
        self._left_attempts -= 1
        self._n_attempts += 1
        try:
            proposer.attempt()
        except BaseException as error:
            self.failures[sequence] = error

    def _chances(
        self, sequence: LiveSequence, proposer: Proposer, n_unknown: int
    ) -> Sequence[float]:
        """The chances of the sequence's next tokens, after `n_unknown` that are not sampled yet."""
        if sequence in self.failures:
            return ()
        return proposer.chances(n_unknown, _most_tokens(sequence, n_unknown))

    def _draft(self, sequence: LiveSequence, proposer: Proposer, count: int) -> Draft | None:
        """The next `count` tokens of the sequence's draft; None if there is none. It is made anew,
        if there is time: its sources know more than when it was made.
        """
        if proposer.is_outdated and self._left_attempts > 0:
            self._attempt(sequence, proposer)
        return None if sequence in self.failures else proposer.draft(count)

    def _row(self, start: int, chances: Sequence[float], costs: StepCosts) -> DraftableRow:
        """The row that decodes the token at position `start` and verifies a draft.

        A store that cannot truncate has the accepted tokens recomputed if any draft token is wrong.
        """
        seconds = costs.draft_seconds(start, 0)
        token_seconds = max(costs.draft_seconds(start, 1) - seconds, _MIN_SECONDS)
        seconds = max(seconds, 0.0)
        if not self._store.can_truncate:
            again_seconds = costs.prompt_seconds(start, 1 + len(chances) // 2)
            seconds += (1 - chances[-1]) * (costs.begin_seconds(start) + again_seconds)
        return DraftableRow(chances, seconds, token_seconds)


def _n_unknown(sequence: LiveSequence) -> int:
    """Tokens of the sequence that steps in flight are sampling. -1 if the next step does not decode
    it: all of its tokens are planned, or it is to be sampled from saved logits.
    """
    planned = sequence.planned_tokens
    if planned >= sequence.end_tokens or type(sequence.pending) is Late:
        return -1
    return planned + 1 - len(sequence.tokens)


def _most_tokens(sequence: LiveSequence, n_unknown: int) -> int:
    """The most draft tokens that may follow the `n_unknown` tokens that are being sampled."""
    return min(sequence.max_new_tokens_left - n_unknown - 1, MAX_DRAFT_TOKENS)


def _price(budget: StepBudget, costs: StepCosts, most_tokens: int) -> StepPrice:
    """The price of a step with the work in the budget, before drafts are added."""
    return StepPrice(
        n_tokens=budget.shape.decode_rows,
        seconds=max(budget.decode_seconds, _MIN_SECONDS),
        verify_seconds=costs.verify_seconds(),
        most_seconds=budget.left_seconds,
        most_tokens=most_tokens,
    )
