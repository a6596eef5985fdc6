"""Plans what a draft model computes: which sequences it continues, by how many tokens, and where
its KV is.

The draft model has a store of its own. A sequence holds a lease there from its first draft on,
until it ends or is preempted; then its tokens stay in the store's prefix cache. A draft that is
rejected needs no roll-back: only tokens that the sequence has count as written, and the next ones
overwrite the rest.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import NamedTuple

from engine.core.budget import StepCosts
from engine.core.sequence import LiveSequence, PlannedRow, Step
from engine.core.step import (
    Decode,
    DraftNext,
    DraftPlan,
    Limits,
    NotDrafted,
    RowResult,
    Sampled,
    SequenceId,
    StepResult,
    Verified,
    Verify,
)
from engine.drafts.allotment import MIN_GAIN, DraftableRow
from engine.values.stats import DraftModelStats
from kvstore.lease import Lease, Refusal
from kvstore.store import KVStore

MOST_TOKENS = 8
"""Of one draft of the model."""

MOST_ROWS = 8
"""Rows that the model may continue in one step: the next step can make drafts of as many."""

REST_STEPS = 4
"""Steps for which no draft is considered after none was predicted to pay: for eight rows that takes
as long as planning a step.
"""

MEMORY_REST_STEPS = 500
"""Steps for which no draft is considered after the model has lacked memory."""

LEAST_KNOWN_TOKENS = 16
"""Known tokens that a step may always have computed, however little time it has left."""

PROBE_TOKENS = 4
PROBE_SHARE = 0.003
"""The share of the time of steps that may be spent on drafts that are not predicted to pay. Else a
model whose drafts were once wrong would never be tried again.
"""
FIRST_PROBES = 4  # whatever they take, before anything is known
MOST_PROBES_SECONDS = 10.0  # that may be saved for later probes

_PROBE_MARGIN = 1.5  # by which a probe must be due before a step in flight is waited for

_MIN_SECONDS = 1e-9  # a divisor for costs that were learned to be 0


@dataclass(slots=True)
class _DraftState:
    """What the draft model has of a sequence: KV of the lease's written tokens, and of `ahead`
    after them. These it has drafted; not all of them need to be the sequence's.
    """

    sequence: LiveSequence
    lease: Lease
    ahead: tuple[int, ...] = ()


class _Candidate(NamedTuple):
    """A row that may be continued, the tokens that it verifies, the chances of the draft's tokens,
    and what they take; `known_seconds` until the draft model has the sequence's tokens.
    """

    sequence: LiveSequence
    n_verified: int
    row: DraftableRow
    known_seconds: float


class DraftModel:
    """Continues sequences after the steps in which that is predicted to pay. Engine thread only."""

    def __init__(self, store: KVStore, context_tokens: int, cost_share: float) -> None:
        """`context_tokens`: the most tokens of a sequence that the model can compute. `cost_share`:
        what a forward of it presumably takes of one of the target model.
        """
        self.store = store
        self.cost_share = cost_share
        self._context_tokens = min(context_tokens, store.pool.n_blocks * store.block_size)
        self._followed: dict[SequenceId, _DraftState] = {}
        # By sequence, if not followed: `n_changes` of the tree, and tokens cached at that time.
        self._cached: dict[SequenceId, tuple[int, int]] = {}
        self._leaving: list[SequenceId] = []
        self._spare_seconds = 0.0  # for probes
        self._first_probes = FIRST_PROBES  # that are left
        self._rest_steps = 0  # for which no draft is considered
        self._first_row = 0  # the row with which the next step begins to look for candidates
        self._stats = DraftModelStats(blocks_total=store.pool.n_blocks)

    @property
    def is_resting(self) -> bool:
        """Whether no draft is considered for the next step."""
        return self._rest_steps > 0 or self._stats.failures > 0

    def is_worth_waiting(
        self,
        decoding: Iterable[tuple[LiveSequence, int]],
        step_seconds: float,
        n_rows: int,
        costs: StepCosts,
    ) -> bool:
        """Whether drafts after the next step, which takes `step_seconds` for `n_rows` rows, are
        predicted to gain more than overlapping it with the step in flight, or a probe is due.
        `decoding`: the sequences that decode, and how many of their tokens are being sampled.
        """
        candidates = self._candidates([(*one, 0) for one in decoding], costs)
        if not candidates:
            return False
        if self._choose(candidates, step_seconds, n_rows, costs)[0]:
            return True
        seconds = _PROBE_MARGIN * self._probe_seconds(self._probe(candidates), costs)
        is_due = self._first_probes > 0 or self._spare_seconds > seconds
        self._rest_steps = 0 if is_due else REST_STEPS
        return is_due

    def plan(self, step: Step, costs: StepCosts, limits: Limits) -> None:
        """Have the model continue rows of the step whose known tokens the host has."""
        if self._stats.failures:
            return
        step_seconds = max(step.budget.decode_seconds, _MIN_SECONDS)
        self._spare_seconds = min(
            self._spare_seconds + PROBE_SHARE * step_seconds, MOST_PROBES_SECONDS
        )
        if self._rest_steps:
            self._rest_steps -= 1
            return
        rows = [
            (planned.sequence, 0, n_verified)
            for planned in step.rows
            if (n_verified := _n_verified(planned)) is not None
        ]
        candidates = self._candidates(rows, costs)
        if not candidates:
            return
        if len(rows) > MOST_ROWS:
            self._first_row += MOST_ROWS  # the others have their turn
        n_rows = step.budget.shape.decode_rows
        n_tokens, chosen = self._choose(candidates, step_seconds, n_rows, costs)
        if not n_tokens:
            probe = self._probe(candidates)
            seconds = self._probe_seconds(probe, costs)
            if self._first_probes:
                self._first_probes -= 1
            elif self._spare_seconds < seconds:
                self._rest_steps = REST_STEPS
                return
            else:
                self._spare_seconds -= seconds
            n_tokens, chosen = PROBE_TOKENS, [probe]
        self._add(step, chosen, n_tokens, costs, limits)

    def commit(self, step: Step, result: StepResult) -> None:
        """Take what the model has computed, before the sequences take their sampled tokens."""
        plan = step.plan.draft
        if plan is None:
            return
        if isinstance(result.drafted, NotDrafted):
            self._lose(result.drafted)
            return
        sampled = {
            planned.sequence.id: _sampled_tokens(of_row)
            for planned, of_row in zip(step.rows, result.rows, strict=True)
        }
        for row in plan.rows:
            if (followed := self._followed.get(row.sequence_id)) is None:
                continue  # it has left since
            lease, drafted = followed.lease, result.drafted.get(row.sequence_id)
            n_planned = lease.planned_tokens - lease.written_tokens
            n_known = 0 if drafted is None else len(row.tokens)
            self.store.commit(lease, n_planned, n_known)
            followed.ahead = ()
            self._stats.known_tokens += n_known
            if drafted:
                self._stats.drafted_tokens += len(drafted)
                own = sampled[row.sequence_id]
                followed.ahead = (*own, *drafted[:-1])
                if (proposer := followed.sequence.proposer) is not None:
                    proposer.continued(len(own), drafted)

    def _lose(self, why: NotDrafted) -> None:
        """Forget what the model had of all sequences. It rests, or is given up."""
        self._release(list(self._followed))
        self._cached.clear()
        self.store.clear()
        while self.store.forget_cleared() is not None:
            pass
        if why is NotDrafted.FAILED:
            self._stats.failures = 1
        else:
            self._rest_steps = MEMORY_REST_STEPS

    def stats(self) -> DraftModelStats:
        """What it has computed, and its blocks. Any thread may call it."""
        return replace(self._stats, blocks_held=self.store.pool.n_referenced)

    def fail(self, step: Step) -> None:
        """Forget what the model was to compute in a step that has failed."""
        if (plan := step.plan.draft) is not None:
            self.store.revoke(plan.ops)
            self._leaving = [*plan.leave, *self._leaving]  # the runner has not dropped their tables
            self._release([row.sequence_id for row in plan.rows])

    def leave(self, sequence: LiveSequence) -> None:
        """Give up the lease of a sequence that ends or is preempted. Its tokens stay cached."""
        self._cached.pop(sequence.id, None)
        if (followed := self._followed.pop(sequence.id, None)) is not None:
            self._catch_up(followed)
            self._leaving.append(sequence.id)
            self.store.donate(followed.lease)

    def _release(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Give up the leases of sequences whose KV is undefined."""
        for sequence_id in sequence_ids:
            if (followed := self._followed.pop(sequence_id, None)) is not None:
                self._leaving.append(sequence_id)
                self.store.release(followed.lease)

    # Which rows are continued.

    def _candidates(
        self, rows: Sequence[tuple[LiveSequence, int, int]], costs: StepCosts
    ) -> list[_Candidate]:
        """The rows that may be continued, MOST_ROWS of them at most. See `_candidate`."""
        first = self._first_row % max(len(rows), 1)
        found = (self._candidate(*row, costs) for row in (*rows[first:], *rows[:first]))
        return list(islice(filter(None, found), MOST_ROWS))

    def _candidate(
        self, sequence: LiveSequence, n_unknown: int, n_verified: int, costs: StepCosts
    ) -> _Candidate | None:
        """The sequence, if the model may continue it after a step. `n_unknown` of its tokens are
        being sampled, and the step verifies `n_verified`. Other sources come first.
        """
        proposer = sequence.proposer
        if proposer is None or proposer.n_expected_elsewhere > n_unknown + n_verified + 1:
            return None
        if sequence.request.images:  # the model would read placeholders
            return None
        start = len(sequence.tokens) + n_unknown - 1
        # After the step's first token, and before the one that follows the draft.
        most = min(
            sequence.max_new_tokens_left - n_unknown - n_verified - 2,
            self._context_tokens - start - n_verified - 2,
            MOST_TOKENS,
        )
        if most < 1:
            return None
        chances = proposer.model_chances(most)
        n_known = start + 1 - self._n_written(sequence)
        known_seconds = costs.draft_model_seconds(int(n_known > LEAST_KNOWN_TOKENS), 0, n_known)
        n_steps = sequence.max_new_tokens_left / (1 + sum(chances))
        seconds = costs.draft_seconds(start, 0)
        token_seconds = costs.draft_seconds(start, 1) - seconds + costs.draft_model_seconds(0, 1)
        row = DraftableRow(
            chances,
            max(seconds, 0.0) + known_seconds / max(n_steps, 1.0),
            max(token_seconds, _MIN_SECONDS),
        )
        return _Candidate(sequence, n_verified, row, known_seconds)

    def _n_written(self, sequence: LiveSequence) -> int:
        """How many of the sequence's tokens the model has KV of, or would find in its cache."""
        if (followed := self._followed.get(sequence.id)) is not None:
            self._catch_up(followed)
            return followed.lease.written_tokens
        n_changes = 0 if self.store.tree is None else self.store.tree.n_changes
        if self._cached.get(sequence.id, (-1, 0))[0] != n_changes:
            cached = self.store.probe(sequence.namespace, sequence.tokens)
            self._cached[sequence.id] = n_changes, cached
        return self._cached[sequence.id][1]

    def _choose(
        self, candidates: Sequence[_Candidate], step_seconds: float, n_rows: int, costs: StepCosts
    ) -> tuple[int, list[_Candidate]]:
        """By how many tokens to continue which of these rows, so that the step gives the most
        tokens a second; 0 if no number gives enough more than the step without drafts.
        """
        value = n_rows / step_seconds
        best, chosen, n_tokens = MIN_GAIN * value, list[_Candidate](), 0
        gains = [list(accumulate(candidate.row.chances)) for candidate in candidates]
        once_seconds = step_seconds + costs.verify_seconds()
        forward_seconds, before = costs.draft_model_seconds(1, 0), 0.0
        for n in range(1, MOST_TOKENS + 1):
            seconds = once_seconds + n * forward_seconds
            tokens, rows = float(n_rows), list[_Candidate]()
            for candidate, gained in zip(candidates, gains, strict=True):
                n_own = min(n, len(gained))
                own = candidate.row.seconds + n_own * candidate.row.token_seconds
                if gained[n_own - 1] > value * own:
                    tokens, seconds = tokens + gained[n_own - 1], seconds + own
                    rows.append(candidate)
            rate = tokens / seconds
            if rows and rate > best:
                best, chosen, n_tokens = rate, rows, n
            elif rate < before:
                break  # chances fall, so more tokens give less
            before = rate
        return n_tokens, chosen

    @staticmethod
    def _probe(candidates: Sequence[_Candidate]) -> _Candidate:
        """The row of which the least has to be computed before its first draft."""
        return min(candidates, key=lambda candidate: candidate.known_seconds)

    @staticmethod
    def _probe_seconds(candidate: _Candidate, costs: StepCosts) -> float:
        seconds = costs.draft_model_seconds(PROBE_TOKENS, PROBE_TOKENS)
        return candidate.known_seconds + seconds + costs.verify_seconds()

    # What is computed.

    def _add(
        self,
        step: Step,
        chosen: Sequence[_Candidate],
        n_tokens: int,
        costs: StepCosts,
        limits: Limits,
    ) -> None:
        """Add a draft plan for these rows to the step."""
        plan = DraftPlan()
        token_seconds = max(costs.draft_model_seconds(0, 0, 1), _MIN_SECONDS)
        n_in_time = min(step.budget.left_seconds / token_seconds, limits.step_tokens)
        room = min(step.budget_tokens, max(int(n_in_time), LEAST_KNOWN_TOKENS))
        for candidate in chosen:
            most = min(n_tokens, len(candidate.row.chances))
            row = self._planned(candidate, most, room, plan)
            if row is not None:
                plan.rows.append(row)
                room -= len(row.tokens)
        if not plan.rows:  # blocks are short
            self._rest_steps = REST_STEPS
        else:
            plan.ops = self.store.take_ops()
            plan.leave, self._leaving = self._leaving, []
            step.plan.draft = plan
            n_rows = sum(max(row.n_draft, 1) for row in plan.rows)
            n_known = sum(len(row.tokens) for row in plan.rows)
            step.budget_tokens -= n_known
            step.budget.add_draft_model(max(row.n_draft for row in plan.rows) or 1, n_rows, n_known)

    def _planned(
        self, candidate: _Candidate, n_draft: int, room: int, plan: DraftPlan
    ) -> DraftNext | None:
        """The row that continues a sequence by `n_draft` tokens, or computes `room` of the tokens
        that the model lacks, if it lacks more; its blocks are planned. None if these are short.
        """
        sequence = candidate.sequence
        if (followed := self._follow(sequence)) is None:
            return None
        lease, start = followed.lease, followed.lease.written_tokens
        n_known = len(sequence.tokens) - start
        n_planned = n_known + 1 + candidate.n_verified + n_draft - 1
        if n_known > room or lease.max_step_tokens(n_planned) < n_planned:
            n_known, n_draft = min(n_known, room), 0
            n_planned = n_known = lease.max_step_tokens(n_known) if n_known > 0 else 0
            if not n_known:
                return None
        if self.store.plan(lease, n_planned) is not None:
            self.leave(sequence)
            return None
        if lease.is_patched:
            plan.patches += [(sequence.id, patch) for patch in lease.take_patches()]
        tokens = tuple(sequence.token_ids(start, start + n_known))
        return DraftNext(sequence.id, start, tokens, followed.ahead, n_draft)

    def _follow(self, sequence: LiveSequence) -> _DraftState | None:
        """The sequence with a lease of all of its tokens; None if too few blocks are available."""
        if (followed := self._followed.get(sequence.id)) is None:
            lease = self.store.admit(
                sequence.namespace, sequence.tokens, shared_tokens=sequence.shared_tokens
            )
            if isinstance(lease, Refusal):
                return None
            self._cached.pop(sequence.id, None)
            self._stats.cached_tokens += lease.cached_tokens
            followed = self._followed[sequence.id] = _DraftState(sequence, lease)
        return followed

    def _catch_up(self, followed: _DraftState) -> None:
        """Count the tokens of the sequence as written that the model has drafted."""
        sequence, lease = followed.sequence, followed.lease
        new = sequence.token_ids(lease.written_tokens, len(sequence.tokens))
        n_right = _n_equal(followed.ahead, new)
        if n_right:
            self.store.commit(lease, n_right)
        followed.ahead = followed.ahead[n_right:] if n_right == len(new) else ()


def _n_verified(planned: PlannedRow) -> int | None:
    """The number of draft tokens that a row verifies which may be continued: its tokens are known
    to the host. None for any other row.
    """
    sequence, lease, row = planned
    if isinstance(row, Verify):
        return len(row.draft)
    is_known = lease.written_tokens + 1 == lease.planned_tokens == len(sequence.tokens)
    return 0 if type(row) is Decode and is_known else None


def _sampled_tokens(result: RowResult) -> tuple[int, ...]:
    """The tokens that a row has sampled."""
    if isinstance(result, Sampled):
        return (result.token.token_id,)
    return tuple(token.token_id for token in result.tokens) if type(result) is Verified else ()


def _n_equal(drafted: Sequence[int], tokens: Sequence[int]) -> int:
    """The number of tokens that both begin with."""
    n_both = min(len(drafted), len(tokens))
    return next((i for i in range(n_both) if drafted[i] != tokens[i]), n_both)
