"""What a draft model computes, on the hash model: its KV is that of its sequences, under random
load, and drafts are made where they pay.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random

import pytest

from engine.core import draft_model
from engine.core.draft_model import FIRST_PROBES, MOST_ROWS, MOST_TOKENS, DraftModel
from engine.core.drafting import DraftPolicy
from engine.core.inbox import Inbox
from engine.core.loop import EngineLoop
from engine.core.metrics import Metrics
from engine.core.namespace_ids import namespace_id
from engine.core.scheduler import Scheduler
from engine.core.step import (
    DraftNext,
    DraftPlan,
    Limits,
    NotDrafted,
    SequenceId,
    StepLost,
    StepPlan,
    StepResult,
    StorageLost,
)
from engine.output.text import output_factory
from engine.values.output import OutputEvent
from engine.values.request import Request, SamplingParams
from engine.values.stats import ALL_TIERS, DraftSource
from engine.values.tokens import pack
from kvstore import invariants
from kvstore.lease import Lease
from kvstore.ops import CopyBlock
from kvstore.pool import BlockPool
from kvstore.sizes import StorageBytes
from kvstore.store import KVStore
from kvstore.tree import RadixTree
from tests.simulation.daemon import LetterDetokenizer
from tests.simulation.fake_runner import FakeRunner, Flight, InjectedError
from tests.simulation.model import ROOT, chain, sample
from tests.unit.engine_harness import VOCAB_SIZE, prompt

BLOCK_SIZE = 4


class DraftingRunner(FakeRunner):
    """The hash model with a draft model, whose KV is compared with the model's.

    `is_right` says of each of a draft's tokens whether it is the one that the model will sample.
    """

    def __init__(
        self,
        pool: BlockPool,
        draft_pool: BlockPool,
        fault: Callable[[], None],
        is_right: Callable[[], bool],
    ) -> None:
        super().__init__(pool, (), BLOCK_SIZE, VOCAB_SIZE, fault, lambda sequence_id: False)
        self.plans: list[StepPlan] = []
        self.not_drafted: NotDrafted | None = None
        self._draft_pool = draft_pool
        self._is_right = is_right
        self.tables: dict[SequenceId, dict[int, int]] = {}
        self._draft_kv: dict[tuple[int, int], int] = {}

    def submit(self, plan: StepPlan) -> None:
        assert not any(flight.plan.draft for flight in self._flights), "drafts are not known yet"
        self.plans.append(plan)
        super().submit(plan)

    def collect(self) -> StepResult:
        flight = self._flights[0]
        result = super().collect()
        if (plan := flight.plan.draft) is None:
            return result
        return result._replace(drafted=self._drafted(plan, flight))

    def _drafted(
        self, plan: DraftPlan, flight: Flight
    ) -> Mapping[SequenceId, tuple[int, ...]] | NotDrafted:
        for sequence_id in plan.leave:
            self.tables.pop(sequence_id, None)
        for sequence_id, patch in plan.patches:
            table = self.tables.setdefault(sequence_id, {})
            table.update(enumerate(patch.ids, start=patch.first))
        if self.not_drafted is not None:
            self._draft_kv.clear()
            return self.not_drafted
        for _, op in plan.ops:
            assert isinstance(op, CopyBlock)
            for slot in range(op.n_tokens):
                self._draft_kv[op.target, slot] = self._draft_kv[op.source, slot]
        found = dict[SequenceId, tuple[int, ...]]()
        for row in plan.rows:
            sampled = [token.token_id for token in flight.sampled.get(row.sequence_id, ())]
            if sampled or not row.n_draft:
                found[row.sequence_id] = self._continue(row, sampled)
        return found

    def _continue(self, row: DraftNext, sampled: Sequence[int]) -> tuple[int, ...]:
        batch_row, table = self._rows[row.sequence_id], self.tables[row.sequence_id]
        truth = self._attend(batch_row)  # up to before the last sampled token
        n_kept = 0
        if row.n_draft and not row.tokens:
            while n_kept < len(sampled) - 1 and row.ahead[n_kept : n_kept + 1] == (
                sampled[n_kept],
            ):
                n_kept += 1
        position, kv = row.start + n_kept, ROOT
        for before in range(position):
            kv = self._draft_kv[table[before // BLOCK_SIZE], before % BLOCK_SIZE]
            assert kv == truth[before + 1], f"position {before} has KV of another prefix"

        def write(token_id: int) -> None:
            nonlocal position, kv
            block = table[position // BLOCK_SIZE]
            assert self._draft_pool.total_refs(block) == 1, "a block is written and shared"  # type: ignore[arg-type]
            kv = chain(kv, token_id, batch_row.adapter)
            self._draft_kv[block, position % BLOCK_SIZE] = kv
            position += 1

        for token_id in (*row.tokens, *(sampled[n_kept:] if row.n_draft else ())):
            write(token_id)
            assert position > batch_row.position or kv == truth[position], "another token"
        drafted = list[int]()
        for ahead in range(row.n_draft):
            index = batch_row.output_index + ahead
            token = sample(kv, batch_row.sampling.seed, index, VOCAB_SIZE, frozenset())
            drafted.append(token if self._is_right() else (token + 1) % VOCAB_SIZE)
            if ahead + 1 < row.n_draft:
                write(drafted[-1])
        return tuple(drafted)


class Engine:
    """An engine with a draft model, or without if it has no blocks. Its loop is turned by hand."""

    def __init__(
        self,
        n_blocks: int = 64,
        n_draft_blocks: int = 64,
        right: float = 1.0,
        cost_share: float = 0.1,
        context_tokens: int = 1000,
        seed: int = 0,
        max_running: int = 8,
    ) -> None:
        random = Random(seed)
        pool, draft_pool = BlockPool(n_blocks), BlockPool(max(n_draft_blocks, 1))
        self.store = KVStore(pool, RadixTree(pool, BLOCK_SIZE), BLOCK_SIZE)
        self.draft_store = KVStore(draft_pool, RadixTree(draft_pool, BLOCK_SIZE), BLOCK_SIZE)
        self.fault_rate = self.loss_rate = 0.0
        self._faults = Random(f"faults {seed}")
        self._losses = Random(f"losses {seed}")
        self.runner = DraftingRunner(pool, draft_pool, self._fault, lambda: random.random() < right)
        model = DraftModel(self.draft_store, context_tokens, cost_share)
        self.scheduler = Scheduler(
            self.store,
            output_factory(frozenset(), lambda _: LetterDetokenizer()),
            Limits(VOCAB_SIZE, 200, n_blocks * BLOCK_SIZE, max_running, 400, 32),
            lambda: 7,
            Metrics(lambda: 0.0),
            drafts=DraftPolicy(self.store, model if n_draft_blocks else None),
        )
        self.tokens = defaultdict[str, list[int]](list)
        self.errors = set[str]()
        self.loop = EngineLoop(
            self.scheduler,
            self.runner,
            Inbox(),
            self._deliver,
            StorageBytes(block=0, slots=(), arenas=0),
        )

    def _fault(self) -> None:
        if self._faults.random() < self.fault_rate:
            raise InjectedError("injected")
        if self._losses.random() < self.loss_rate:
            raise self._losses.choice([StepLost, StorageLost])("lost")

    def _deliver(self, events: list[OutputEvent]) -> None:
        for event in events:
            self.tokens[event.request_id] += event.token_ids
            if event.error is not None:
                assert "injected" in event.error
                self.errors.add(event.request_id)

    def add(self, request: Request) -> None:
        self.scheduler.add(self.scheduler.prepare(request))

    def turn(self) -> None:
        self.loop.turn()
        invariants.check(self.store)
        invariants.check(self.draft_store)

    def serve(self, *requests: Request) -> None:
        for request in requests:
            self.add(request)
        while not self.loop.is_idle:
            self.turn()

    @property
    def draft_rows(self) -> list[DraftNext]:
        """All rows that were continued."""
        plans = (plan.draft for plan in self.runner.plans if plan.draft is not None)
        return [row for plan in plans for row in plan.rows]


def request(name: str, seed: int, n_prompt: int = 9, max_tokens: int = 40) -> Request:
    sampling = SamplingParams(seed=4 * seed)  # such texts do not repeat themselves
    return Request(name, pack(prompt(seed, n_prompt)), max_tokens, sampling)


@pytest.mark.parametrize("seed", range(12))
def test_its_kv_is_that_of_the_sequences_under_random_load(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With preemptions, aborts, clears, and steps that fail or are lost. The runner compares KV."""
    caplog.set_level("CRITICAL")
    random = Random(seed)
    engine = Engine(
        random.choice([16, 24, 60]),
        random.choice([8, 16, 60]),
        random.choice([0.5, 0.9, 1.0]),
        seed=seed,
    )
    engine.fault_rate = random.choice([0.0, 0.01])
    engine.loss_rate = [0.0, 0.02][seed % 2]
    prompts = [prompt(n, random.randrange(1, 30)) for n in range(4)]
    wanted = [
        Request(
            f"r{n}",
            pack([*random.choice(prompts), *prompt(90 + n, random.randrange(1, 4))]),
            random.randrange(1, 25),
            SamplingParams(seed=random.randrange(1 << 20)),
            n=1,
        )
        for n in range(60)
    ]
    aborted, waiting = set[str](), list(wanted)
    while waiting or not engine.loop.is_idle:
        while waiting and len(engine.scheduler.live) < 10:
            engine.add(waiting.pop())
        engine.turn()
        if random.random() < 0.05:
            aborted.add(name := random.choice(wanted).id)
            engine.loop.abort(name)
        if random.random() < 0.02:
            engine.loop.clear()
    assert engine.draft_rows
    truth = Engine(2000, 0)
    truth.serve(*wanted)
    for each in wanted:
        found = engine.tokens[each.id]
        is_whole = each.id not in aborted | engine.errors
        assert found == truth.tokens[each.id][: None if is_whole else len(found)]
    while engine.loop.forget_cleared() is not None:
        pass
    for store in (engine.store, engine.draft_store):
        assert not store.leases
        assert store.available_blocks == store.pool.n_blocks


def test_tables_of_sequences_that_have_ended_are_dropped_though_steps_fail() -> None:
    engine = Engine()
    for n in range(20):
        engine.fault_rate = 0.2
        engine.serve(*(request(f"r{n}.{index}", 4 * n + index) for index in range(4)))
    assert engine.errors
    engine.fault_rate = 0.0
    engine.serve(request("last", 1))
    assert len(engine.runner.tables) == 1, "only of the sequence that was drafted for last"


def test_a_model_that_is_always_right_leaves_few_steps() -> None:
    engine, plain = Engine(), Engine(n_draft_blocks=0)
    for each in engine, plain:
        each.serve(request("a", 1), request("b", 2))
    assert engine.tokens == plain.tokens
    assert len(engine.runner.plans) < 0.4 * len(plain.runner.plans)
    counts = engine.scheduler.metrics.drafts[DraftSource.MODEL]
    assert counts.accepted_tokens == counts.drafted_tokens > 50


def test_a_model_that_is_never_right_is_tried_rarely() -> None:
    engine = Engine(right=0.0)
    engine.serve(*(request(f"r{n}", n) for n in range(30)))
    n_tried = len(engine.runner.plans)
    drafted = sum(plan.draft is not None for plan in engine.runner.plans)
    assert 0 < drafted < FIRST_PROBES + 8 + 0.05 * n_tried


def test_a_model_that_is_as_slow_as_the_model_does_not_pay() -> None:
    """But for the drafts from which its chances are learned."""
    engine = Engine(cost_share=1.0)
    engine.serve(*(request(f"r{n}", n) for n in range(8)))
    rows = [row for row in engine.draft_rows if row.n_draft]
    assert 0 < len(rows) <= 2 * FIRST_PROBES


def test_no_row_is_continued_beyond_its_end_or_the_models_context() -> None:
    engine = Engine(context_tokens=30)
    engine.serve(request("long", 1, n_prompt=20), request("short", 2, max_tokens=3))
    assert engine.draft_rows
    for row in engine.draft_rows:
        assert row.start + len(row.tokens) + row.n_draft < 30
        assert row.n_draft <= MOST_TOKENS
    assert len(engine.tokens["long"]) == 40


def test_a_long_prompt_is_computed_in_parts() -> None:
    engine = Engine(n_blocks=200, n_draft_blocks=200)
    engine.serve(request("r", 1, n_prompt=100))
    first, *others = engine.draft_rows
    assert first.n_draft == 0
    assert len(first.tokens) <= 32
    assert sum(len(row.tokens) for row in engine.draft_rows) == pytest.approx(101, abs=3)
    assert any(row.n_draft for row in others)


def test_few_rows_are_continued_at_once() -> None:
    engine = Engine(n_blocks=400, n_draft_blocks=400, cost_share=0.001)
    engine.serve(*(request(f"r{n}", n) for n in range(8)))
    most = max(len(plan.draft.rows) for plan in engine.runner.plans if plan.draft is not None)
    assert 1 < most <= MOST_ROWS


def test_a_model_that_has_failed_is_not_used_again() -> None:
    engine = Engine()
    engine.serve(request("before", 1))
    engine.runner.not_drafted = NotDrafted.FAILED
    engine.serve(request("during", 2))
    engine.runner.plans.clear()
    engine.serve(request("after", 3))
    assert not engine.draft_rows
    assert not engine.draft_store.leases
    plain = Engine(n_draft_blocks=0)
    plain.serve(*(request(name, n) for n, name in enumerate(("before", "during", "after"), 1)))
    assert engine.tokens == plain.tokens


def test_a_model_that_has_lacked_memory_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It begins with an empty storage."""
    monkeypatch.setattr(draft_model, "MEMORY_REST_STEPS", 20)
    engine, plain = Engine(), Engine(n_draft_blocks=0)
    engine.serve(request("before", 1))
    engine.add(request("during", 2))
    while not any(row.n_draft for row in engine.draft_rows[-1:]):
        engine.turn()
    engine.runner.not_drafted = NotDrafted.NO_MEMORY
    n_plans = len(engine.runner.plans)
    while all(plan.draft is None for plan in engine.runner.plans[n_plans:]):
        engine.turn()
    engine.turn()  # in which that step is collected
    engine.runner.not_drafted = None
    n_plans = len(engine.runner.plans)
    engine.serve(request("after", 3), request("again", 1))
    rests = [plan.draft is None for plan in engine.runner.plans[n_plans:]]
    assert 17 <= rests.index(False) <= 22
    plain.serve(*(request(name, n) for n, name in enumerate(("before", "during", "after"), 1)))
    plain.serve(request("again", 1))
    assert engine.tokens == plain.tokens


def test_rows_take_turns_where_there_are_more_than_are_considered() -> None:
    engine = Engine(n_blocks=800, n_draft_blocks=800, cost_share=0.001, max_running=3 * MOST_ROWS)
    for n in range(3 * MOST_ROWS):
        engine.add(request(f"r{n}", n, max_tokens=60))
    while max(map(len, engine.tokens.values()), default=0) < 40:
        engine.turn()
    assert {row.sequence_id // MOST_ROWS for row in engine.draft_rows if row.n_draft} == {0, 1, 2}


def test_what_has_been_computed_for_others_since_counts_as_known() -> None:
    engine = Engine()
    engine.add(request("waits", 1, n_prompt=30))
    [sequence] = engine.scheduler.live
    drafts = engine.scheduler.drafts
    assert drafts is not None
    assert drafts.model is not None
    assert drafts.model._n_written(sequence) == 0
    lease = engine.draft_store.admit(sequence.namespace, sequence.tokens)
    assert isinstance(lease, Lease)
    assert engine.draft_store.plan(lease, 30) is None
    engine.draft_store.commit(lease, 30)
    engine.draft_store.donate(lease)
    assert drafts.model._n_written(sequence) == 29


def test_long_leases_that_end_at_once_are_released_over_several_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of the model: no step waits for all of them."""
    monkeypatch.setattr("kvstore.store.MAX_RELEASED_BLOCKS", 4)
    engine = Engine()
    for n in range(6):
        engine.add(request(f"r{n}", n, n_prompt=20))
    while len(engine.draft_store.leases) < 5:
        engine.turn()
    pool, longest = engine.draft_store.pool, max(len(e.table) for e in engine.draft_store.leases)
    engine.loop.abort_all()
    while not engine.loop.is_idle:
        before = pool.n_referenced
        engine.turn()
        assert before - pool.n_referenced <= 2 * (4 + longest)  # before a plan, and at a commit
    assert not engine.draft_store.ended
    assert engine.draft_store.available_blocks == pool.n_blocks


def test_a_namespace_that_only_the_draft_model_has_can_be_cleared() -> None:
    engine = Engine()
    engine.serve(replace(request("r", 1), cache_salt="alice"))
    engine.store.clear()
    [namespace] = engine.loop.namespaces - {engine.scheduler.namespaces.unsalted}
    engine.loop.clear_named(namespace_id(namespace), (), ALL_TIERS)
    while engine.loop.forget_cleared() is not None:
        pass
    assert engine.draft_store.pool.n_free == engine.draft_store.pool.n_blocks


def test_the_prompt_of_a_resent_request_is_cached() -> None:
    engine = Engine()
    engine.serve(request("first", 1, n_prompt=30))
    engine.runner.plans.clear()
    engine.serve(replace(request("again", 1, n_prompt=30), sampling=SamplingParams(seed=88)))
    assert sum(len(row.tokens) for row in engine.draft_rows) < 6
