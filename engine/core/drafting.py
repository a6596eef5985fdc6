"""Drafts of live sequences: begins their proposers, and adds the drafts that pay to steps.

A draft continues the last token of its sequence, which must be known. So a step with drafts never
overlaps with the steps before and after it: each is collected before the next is planned.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import partial

from engine.core.budget import StepBudget, StepCosts
from engine.core.draft_model import DraftModel
from engine.core.sequence import LiveSequence, Step
from engine.core.step import Decode, Late, Limits, Verify
from engine.drafts.allotment import DraftableRow, Probes, StepPrice, allot
from engine.drafts.proposer import MAX_BACKOFF, MAX_DRAFT_TOKENS, Proposer, first_rates
from engine.drafts.sources import Draft, Drafter, Forced, LatestAnswers, ModelText
from engine.drafts.suffix_index import RequestTexts
from kvstore.store import KVStore
from kvstore.tokens import Tokens
from kvstore.types import Namespace

_MIN_SECONDS = 1e-9  # a divisor for costs that were learned to be 0

MAX_ATTEMPTS, ROWS_AN_ATTEMPT = 8, 8
"""The most drafts that are made for one step, each in 0.1 to 0.3 ms. Sequences take turns. It is
one less for each 8 rows of the step before, which take as long to plan and commit; at least one.
"""


class DraftPolicy:
    """Begins a proposer for each sequence, and adds the drafts that pay to the scheduler's steps.
    A sequence whose proposer has raised is not drafted for; it is in `failures` with the error,
    until the scheduler ends it. Engine thread only.
    """

    def __init__(self, store: KVStore, model: DraftModel | None = None) -> None:
        """`model`: the draft model; None if there is none."""
        self.model = model
        self.failures: dict[LiveSequence, BaseException] = {}
        self._store = store
        self._answers = LatestAnswers()
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
        text = None if self.model is None else ModelText()
        drafter = Drafter(
            texts,
            partial(self._store.continuation, namespace, tokens),
            partial(self._answers.propose, namespace),
            forced,
            text,
        )
        max_backoff = MAX_BACKOFF if forced is None else 0  # forced tokens come and go
        return Proposer(drafter.draft, self._rates, max_backoff, text)

    def ended(self, namespace: Namespace, tokens: Tokens, prompt_tokens: int) -> None:
        """Remember the output of a finished sequence."""
        self._answers.add(namespace, tokens.packed(prompt_tokens, len(tokens)))

    def clear(self, namespace: Namespace | None = None) -> None:
        """Forget the outputs of one namespace, or all, and what the draft model has cached."""
        self._answers.clear(namespace)
        if self.model is not None:
            self.model.store.clear(namespace)

    def forget_cleared(self, most: int) -> bool:
        """Free some `most` cleared blocks of the draft model. False where none are left."""
        return self.model is not None and self.model.store.forget_cleared(most) is not None

    @property
    def namespaces(self) -> Collection[Namespace]:
        """The namespaces of which the draft model has anything cached."""
        tree = None if self.model is None else self.model.store.tree
        return () if tree is None else tree.roots

    def leave(self, sequence: LiveSequence) -> None:
        """Give up what the draft model holds for a sequence that ends or is preempted."""
        if self.model is not None:
            self.model.leave(sequence)

    def prefers_sync(
        self, decoding: Iterable[LiveSequence], costs: StepCosts, limits: Limits
    ) -> bool:
        """Whether drafts of the next step are predicted to gain more than overlapping it with the
        step in flight, or a probe is due. `decoding` are the sequences that decode.
        """
        if self._is_due(decoding, costs, limits):
            return True
        if self.model is None or self.model.is_resting:
            return False
        unknown = [(one, n_unknown) for one in decoding if (n_unknown := _n_unknown(one)) >= 0]
        if not any(n_unknown for _, n_unknown in unknown):
            return False
        starts = [one.planned_tokens for one, _ in unknown]
        budget = StepBudget(costs, limits.step_stretch, len(starts))
        budget.add_decodes(len(starts), sum(starts) + len(starts))
        seconds = max(budget.decode_seconds, _MIN_SECONDS)
        return self.model.is_worth_waiting(unknown, seconds, len(starts), costs)

    def _is_due(self, decoding: Iterable[LiveSequence], costs: StepCosts, limits: Limits) -> bool:
        """Whether drafts that are expected already are a reason not to overlap the next step."""
        drafting = [
            (sequence, proposer, n_unknown)
            for sequence in decoding
            if (proposer := sequence.proposer) is not None
            and not proposer.backoff_tokens
            and (n_unknown := _n_unknown(sequence)) > 0
            and sequence.planned_tokens + 1 < sequence.end_tokens  # a draft may have a token
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

    def add(self, step: Step, costs: StepCosts, limits: Limits) -> None:
        """Turn decodes of the step into rows that verify drafts, if these pay or a probe is due.

        Drafts use the rest of the step's time and tokens, and free blocks. They follow known
        tokens, so no sequence with a draft is in flight.
        """
        self._probes.count_step()
        self._answers.catch_up()
        if not step.is_short_of_blocks:
            self._verify(step, costs, limits)
            if self.model is not None:
                self.model.plan(step, costs, limits)
        self._left_attempts = max(MAX_ATTEMPTS - len(step.rows) // ROWS_AN_ATTEMPT, 1)

    def _verify(self, step: Step, costs: StepCosts, limits: Limits) -> None:
        """Turn decodes of the step into rows that verify drafts. See `add`."""
        drafting = [
            (index, sequence, lease, proposer)
            for index, (sequence, lease, row) in enumerate(step.rows)
            if (proposer := sequence.proposer) is not None
            and not proposer.backoff_tokens
            and type(row) is Decode
            and lease.written_tokens + 1 == lease.planned_tokens == len(sequence.tokens)
            and lease.planned_tokens < sequence.end_tokens  # a draft may have a token
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
                token, tokens = sequence.tokens[start], draft.tokens[:n_tokens]  # never an image
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
        if proposer.is_due or sequence in self.failures:
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
