"""The real scheduler, store and loop under random load, with everything recounted at each step.

One seed decides all: the sizes, the arrivals, the aborts, the clears, the faults, the restarts.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf
from random import Random

from engine.api import InvalidRequest, QueueFull
from engine.core.namespace_ids import namespace_id
from engine.core.sequence import LiveSequence
from engine.core.step import SequenceId, StepLost, StorageLost
from engine.drafts.proposer import Proposer, first_rates
from engine.values.output import FinishReason, OutputEvent
from engine.values.stats import CacheTier
from kvstore import invariants
from kvstore.tokens import root_digest
from kvstore.types import Namespace
from tests.simulation.census import Census, Happening
from tests.simulation.checks.disk import DiskCheck
from tests.simulation.checks.namespaces import NamespaceCheck
from tests.simulation.checks.pictures import PictureCheck
from tests.simulation.checks.progress import Watchdog
from tests.simulation.checks.records import RecordCheck
from tests.simulation.checks.statistics import StatisticsCheck
from tests.simulation.checks.tree import ContentCheck
from tests.simulation.checks.waits import WaitCheck
from tests.simulation.daemon import Daemon, Layout, World
from tests.simulation.expected import Expected, expected
from tests.simulation.fake_runner import InjectedError, Launching
from tests.simulation.host_faults import FaultyDrafter, make_faulty, raise_injected
from tests.simulation.load_watch import LoadWatch
from tests.simulation.model import ADAPTERS, NAMESPACES, SALTS
from tests.simulation.oracle import Oracle, Overconfident
from tests.simulation.receiver import Receiver
from tests.simulation.troubled_store import HEALTHY, Temper, TroubledStore
from tests.simulation.workload import PinningWorkload, Workload

PATIENCE = 100
"""Turns. A load may take twenty seconds, and turns that sleep take a quarter of one."""

BACKGROUND_RATES = 0.0, 0.0, 0.1
"""Shares of the requests that are computed in the background."""

PINNING_RATES = 0.0, 0.0, 0.3
"""Shares of the requests in the background where the model's groups allow pins."""

PINNING_MACHINES = 11
"""One machine in this many has a small arena, and clients that pin prefixes in it."""

LOSING_MACHINES = 13
"""One machine in this many loses steps, and all that is stored."""

IMAGE_MACHINES = 0.35
"""The share of the machines whose model takes images."""

LOST = {StepLost: Happening.STEP_LOST, StorageLost: Happening.STORAGE_LOST}

CLEARED = {
    (CacheTier.MEMORY,): Happening.CLEARED_MEMORY,
    (CacheTier.DISK,): Happening.CLEARED_DISK,
    (CacheTier.MEMORY, CacheTier.DISK): Happening.CLEARED_BOTH,
}


class Simulation:
    """One machine's life: engines, one after another, and the disk that they leave behind.

    `step` is one turn of the loop, with whatever happens around it.
    """

    def __init__(self, seed: int) -> None:
        random = self.random = Random(seed)
        self._launching = list(Launching)[seed % len(Launching)]
        self.now, self.steps = 0.0, 0
        self.census = Census()
        self.receivers: dict[str, Receiver] = {}
        self._n_events = 0
        self._admitted: list[LiveSequence] = []
        self._fault_rate = random.choice([0.0, 0.0, 0.01, 0.1])
        self._op_faults = Random(f"ops {seed}")
        self._op_fault_rate = self._op_faults.choice([0.0, 0.0, 0.3])
        self._losses = Random(f"losses {seed}")
        self._loss_rate = self._losses.choice([0.02, 0.1]) if seed % LOSING_MACHINES == 11 else 0.0
        self._host_faults = Random(f"host {seed}")
        self._host_fault_rate = self._host_faults.choice([0.0, 0.0, 0.002, 0.02])
        self._draw_rates()
        self._pieces, self._image_faults = Random(f"pieces {seed}"), Random(f"image faults {seed}")
        pins = Random(f"pins {seed}")
        is_pinning = seed % PINNING_MACHINES == 2
        self._layout = Layout.draw(random)
        if is_pinning:
            self._layout = replace(
                self._layout,
                windows=(),
                has_states=False,
                n_blocks=(8, 12, 16),
                context_tokens=(200,),
            )
        images = Random(f"images {seed}")
        self._layout = self._layout.with_images(images, IMAGE_MACHINES)
        check = RecordCheck(self._layout.vocab_size)
        self.tier = TroubledStore(random, Temper.draw(random), check, self.census)
        self._has_disk = random.random() < 0.85
        self._draft_error = random.choice([None, 0.02, 0.3])  # None: nothing is drafted
        self._new_proposer = random.choice([Proposer, Overconfident])
        sizes = self._layout.vocab_size, self._layout.block_size
        can_pin = not (self._layout.windows or self._layout.has_states)
        if is_pinning:
            rates: Sequence[float] = self._pin_much(pins)
            self._workload: Workload = PinningWorkload(random, *sizes, rates)
        else:
            rates = PINNING_RATES if can_pin else BACKGROUND_RATES
            self._workload = Workload(random, *sizes, rates)
        if self._layout.takes_images:
            self._workload.send_images(images, is_whole=self._layout.has_whole_images)
        self._namespaces = NamespaceCheck()
        self._start()

    def _draw_rates(self) -> None:
        """How often what clients and operators do happens."""
        random = self.random
        self._crowds = random.choice([[1], [1, 1, 3]])
        self._abort_rate = random.choice([0.0, 0.02, 0.1])
        self._arrival_rate = random.choice([0.1, 0.5, 0.8])
        self._clear_rate = random.choice([0.05, 0.2, 0.4])
        self._restart_rate = random.choice([0.0, 0.03, 0.06])

    def _pin_much(self, pins: Random) -> Sequence[float]:
        """Have pins last, and steps overlap. Return the shares of requests in the background."""
        self._arrival_rate, self._clear_rate = pins.choice([0.1, 0.3]), 0.01
        self._abort_rate = self._restart_rate = 0.0
        self._has_disk = pins.random() < 0.3
        if pins.random() < 0.7:
            self._draft_error = None
        return [pins.choice([0.3, 0.6])]

    def _start(self) -> None:
        """Another engine."""
        world = World(
            lambda: self.now,
            self._deliver,
            self._fault,
            self._row_fault,
            self._answer_fault,
            self._launching,
            self._op_fault,
            self._image_fault,
        )
        tier = self.tier if self._has_disk else None
        self.daemon = Daemon(self.random, self._layout, world, tier, self.census)
        self.loop = self.daemon.loop
        self._watch = LoadWatch(self.daemon, self.census)
        self._dog = Watchdog(PATIENCE)
        self._content = ContentCheck(self.daemon.store, self.daemon.runner)
        self._disk_check = DiskCheck(self.daemon, self.tier)
        self._waits = WaitCheck(self.daemon, self.census)
        self._statistics = StatisticsCheck(self.daemon)
        self._pictures = PictureCheck(self.daemon, Random(self.random.random()))
        self._wakes_at = inf
        self._rates = first_rates()
        self._idle_turns = 0

    def step(self) -> None:
        """Let something happen, then turn the loop once and recount everything."""
        random = self.random
        if random.random() < self._arrival_rate:
            for _ in range(random.choice(self._crowds)):
                self.submit()
        if self.receivers and random.random() < self._abort_rate:
            self._abort(random.choice(list(self.receivers)))
        if random.random() < self._clear_rate:
            self._clear()
        if random.random() < self._restart_rate:
            self._restart()
        self.turn()

    def turn(self) -> None:
        """Let time pass: the loop turns, unless it sleeps."""
        if self._has_disk:
            self.tier.tick()
        if self.now < self._wakes_at and self.daemon.inbox.is_empty:
            self.now += min(self._wakes_at - self.now, 1.0)
        else:
            self._turn()
        self._dog.turned(
            self._n_events,
            self.daemon.runner.n_computed,
            self._watch.n_ended,
            is_waiting=bool(self.loop.scheduler.live or self.daemon.loads),
        )

    def _turn(self) -> None:
        self.daemon.inbox.post(lambda: None)
        metrics = self.daemon.scheduler.metrics
        late_rows, recomputed = metrics.late_rows, metrics.recomputed_sequences
        tower = self.daemon.runner.tower
        lost = tower.n_lost
        self.loop.turn()
        self.census[Happening.SAT_OUT] += metrics.late_rows - late_rows
        self.census[Happening.RECOMPUTED] += metrics.recomputed_sequences - recomputed
        self.census[Happening.IMAGE_LOST] += tower.n_lost - lost
        self.daemon.inbox.check()
        self.steps += 1
        self._watch.turned()
        self._recount()
        has_rested = self.daemon.in_flight == 0
        awaits_answers = bool(
            self.daemon.scheduler.sequences.unanswered
        )  # that is a sleep of its own
        self._idle_turns = self._idle_turns + 1 if has_rested and not awaits_answers else 0
        assert self._idle_turns < 10, "turns and turns without sleep or work"
        self.now += 0.0 if has_rested else 1.0
        self._wakes_at = self.now
        if self.daemon.wants_sleep:
            disk = self.daemon.scheduler.disk
            seconds = None if disk is None else disk.wait_seconds()
            self._wakes_at = inf if seconds is None else self.now + seconds
            self._idle_turns = 0

    def _recount(self) -> None:
        daemon = self.daemon
        self._statistics.check()
        for sequence in daemon.scheduler.running:
            most_tokens = sequence.prompt_tokens + max(sequence.request.max_tokens - 1, 0)
            assert sequence.planned_tokens <= most_tokens, "computed what nobody asks for"
        adapters = {sequence.request.adapter for sequence in daemon.scheduler.running}
        self.census[Happening.MIXED] += len(adapters) > 1
        self._waits.check()
        invariants.check(daemon.store)
        if not daemon.scheduler.has_work:
            invariants.check_idle(daemon.store)
            if (images := daemon.scheduler.images) is not None and daemon.loop.in_flight is None:
                assert not [*filter(None, images.problems())], [*images.problems()]
        self._disk_check.check()
        self._check_pins()
        self._content.check_attached()
        for sequence in self._admitted:
            self._content.check_adopted(sequence)
            self._namespaces.check(sequence)
        self._admitted.clear()
        self._pictures.check()

    def _check_pins(self) -> None:
        """Each block that a pin holds counts once, and no other block."""
        leases = [lease for lease in self.daemon.store.leases if lease.is_pin]
        pinned = {block for lease in leases for block in lease.table}
        assert self.daemon.scheduler.pins.n_blocks == len(pinned), "pinned blocks are miscounted"
        self.census[Happening.PINNED] += bool(pinned)

    def settle(self) -> None:
        """No more arrivals: everybody must come to an end, and leave nothing held."""
        self._fault_rate = self._op_fault_rate = self._host_fault_rate = self._loss_rate = 0.0
        temper = self.tier.temper
        self.tier.temper = replace(
            HEALTHY, meanwhile=temper.meanwhile, longest_path=temper.longest_path
        )
        turns_left = 200 + 40 * sum(s.request.max_tokens + 60 for s in self.loop.scheduler.live)
        while not self.loop.is_idle:
            self.turn()
            turns_left -= 1
            assert turns_left > 0, "the sequences that are left make no progress"
        assert not self.receivers, "somebody never got the terminal events"
        self._end_engine()
        store = self.daemon.store
        self.daemon.scheduler.pins.clear(None)
        store.clear()
        store.forget_cleared()
        assert store.pool.n_free == store.pool.n_blocks

    def submit(self) -> None:
        request = self._workload.request(self.daemon.limits)
        self._wake()
        try:
            self.loop.scheduler.add(self.daemon.prepared(request), self.now)
        except (InvalidRequest, QueueFull):
            return
        sequences = [s for s in self.loop.scheduler.live if s.request is request]
        truths = [self._expected(sequence) for sequence in sequences]
        self.receivers[request.id] = Receiver(request, sequences, truths)
        for sequence, truth in zip(sequences, truths, strict=True):
            self._statistics.submitted(sequence)
            self._namespaces.submitted(sequence)
            if self._host_fault_rate:
                make_faulty(sequence, self._host_fault)
            self._speculate(sequence, truth)

    def _speculate(self, sequence: LiveSequence, truth: Expected) -> None:
        error = self._draft_error
        if error is None:
            return
        oracle = Oracle(truth.token_ids, self.random, error, self._layout.vocab_size)
        drafter = FaultyDrafter(oracle, self._host_fault)
        sequence.proposer = self._new_proposer(drafter, self._rates)

    def _abort(self, request_id: str) -> None:
        self._wake()
        self.census[Happening.ABORTED_WAITING] += self._watch.waits(request_id)
        self.loop.abort(request_id)

    def _clear(self) -> None:
        """One tier or both, of one namespace, by its name or as it is, or of all."""
        self._wake()
        adapter = self.random.choice(["", *ADAPTERS])
        of_adapter = [NAMESPACES.of(salt, adapter) for salt in SALTS]
        namespace = self.random.choice([None, *of_adapter])
        [tiers] = self.random.choices(list(CLEARED), [60, 1, 1])
        if CacheTier.DISK in tiers:
            self._disk_check.excuse()
        if namespace is not None and self.random.random() < 0.5:
            self.loop.clear_named(namespace_id(namespace), (), tiers)
        else:
            self.loop.clear(namespace, tiers)
        self._check_cleared(namespace, tiers)
        store, pieces = self.daemon.store, self._pieces
        while pieces.random() < 0.9 and store.forget_cleared(pieces.randint(1, 100)) is not None:
            continue  # the rest may still be there when others take blocks
        self.census[CLEARED[tiers]] += 1
        self._watch.cut_off(Happening.LOAD_CLEARED)

    def _check_cleared(self, namespace: Namespace | None, tiers: Collection[CacheTier]) -> None:
        root = None if namespace is None else root_digest(namespace)
        if CacheTier.MEMORY in tiers:
            tree = self.daemon.store.tree
            indexed = () if tree is None else tree.roots
            assert not [it for it in indexed if namespace in (None, it)], "still in memory"
            pins = [it for it in self.daemon.store.leases if it.is_pin]
            assert not [it for it in pins if namespace in (None, it.namespace)], "still pinned"
            reading = [it.extent.root for it in self.tier.unread()] if self._has_disk else []
            assert not [it for it in reading if root in (None, it)], "on its way to the disk"
        if CacheTier.DISK in tiers and self._has_disk:
            assert not [it for it in self.tier.held_roots() if root in (None, it)], "still on disk"

    def _restart(self) -> None:
        """Another engine finds what this one has left: having ended, or having been killed."""
        if self.random.random() < 0.5:
            self.loop.abort_all()
            self._end_engine()
            self.census[Happening.RESTARTED] += 1
        else:
            self.tier.close()
            self.census[Happening.KILLED] += 1
        self.receivers.clear()
        self._admitted.clear()
        self._start()

    def _end_engine(self) -> None:
        """As the loop when it has been told to stop."""
        disk = self.daemon.scheduler.disk
        if disk is not None:
            disk.end()
        self._watch.cut_off(Happening.LOAD_OUTLIVED)
        self._wake()
        while disk is not None and disk.is_ending:
            self.turn()
        if disk is not None:
            disk.close()
        assert not self.daemon.loads, "loads outlive their engine"

    def _wake(self) -> None:
        self._wakes_at = self.now

    def _expected(self, sequence: LiveSequence) -> Expected:
        stop_token_ids = self.daemon.new_output(sequence.request).stop_token_ids
        return expected(sequence.request, sequence.seed, self._layout.vocab_size, stop_token_ids)

    def _deliver(self, events: list[OutputEvent]) -> None:
        self._n_events += len(events)
        for event in events:
            is_expected = event.param == "pin" or "injected" in (event.error or "injected")
            assert is_expected, event.error
            self.census[Happening.HOST_FAILED] += "Injected" in (event.error or "")
            receiver = self.receivers[event.request_id]
            receiver.receive(event)
            sequence = receiver.sequences[event.index]
            self._statistics.delivered(sequence, event)
            if event.admission is not None:
                self._admitted.append(sequence)
            if event.finish_reason in {FinishReason.STOP, FinishReason.LENGTH}:
                self._check_cached_tokens(sequence)
            if event.usage is not None:
                self.census[Happening.DRAFT_ACCEPTED] += event.usage.accepted_draft_tokens
                self.census[Happening.DRAFT_REJECTED] += event.usage.rejected_draft_tokens
                if receiver.request.constraint is not None:
                    n_accepted = event.usage.accepted_draft_tokens
                    self.census[Happening.GUIDED_DRAFT_ACCEPTED] += n_accepted
            if event.pooled and event.usage is not None:
                self.census[Happening.POOLED] += 1
                self.census[Happening.POOLED_SHARED] += event.usage.cached_tokens > 0
            if len(receiver.ends) == receiver.request.n:
                del self.receivers[event.request_id]

    def _check_cached_tokens(self, sequence: LiveSequence) -> None:
        """What was not reported as cached has been computed, each token once."""
        computed = self.daemon.runner.computed_tokens.pop(sequence.id)
        if sequence.admissions > 1:
            return
        given = sequence.cached_tokens + sequence.forked_tokens
        uncomputed = len(sequence.tokens) - given - computed
        needless = 1 if sequence.output_tokens else 0  # the last sampled token needs no KV
        is_late = sequence.request.constraint is not None  # who learns late that it was the last
        if sequence.drafted_tokens:
            # What lies behind its end is computed, too, and what a state went back from twice.
            assert uncomputed <= needless
        else:
            assert uncomputed == needless or (is_late and uncomputed == 0)

    def _fault(self) -> None:
        if self.random.random() < self._fault_rate:
            raise InjectedError("injected")
        if self._losses.random() < self._loss_rate:
            loss = self._losses.choice([StepLost, StorageLost])
            self.census[LOST[loss]] += 1
            raise loss("no request may end with this")

    def _op_fault(self) -> None:
        """A step may fail after some of its ops have been carried out."""
        if self._op_faults.random() < self._op_fault_rate:
            raise InjectedError("injected")

    def _host_fault(self) -> None:
        """The code of one sequence on the host may fail."""
        if self._host_faults.random() < self._host_fault_rate:
            raise_injected(self._host_faults.random())

    def _image_fault(self) -> bool:
        return self._image_faults.random() < self._fault_rate / 4

    def _answer_fault(self) -> bool:
        return self.random.random() < self._fault_rate

    def _row_fault(self, sequence_id: SequenceId) -> bool:
        return self.random.random() < self._fault_rate / 4


def run(seed: int, steps: int) -> tuple[int, Census]:
    """Simulate for about `steps` steps of one machine; returns how many there were, and what
    happened.

    Raises AssertionError with the seed in its notes when anything does not hold.
    """
    try:
        simulation = Simulation(seed)
        for _ in range(steps):
            simulation.step()
        simulation.settle()
    except BaseException as error:
        error.add_note(f"simulation seed {seed}, {steps} steps")
        raise
    return simulation.steps, simulation.census
