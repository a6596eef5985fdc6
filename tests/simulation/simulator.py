"""The real scheduler, store and loop under random load, with everything recounted at each step.

One seed decides all: the sizes, the arrivals, the aborts, the clears, the faults.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from math import inf
from random import Random

from llguidance import LLTokenizer

from engine.api import InvalidRequest, QueueFull
from engine.constraints.compiler import GrammarCompiler
from engine.constraints.masks import MaskFiller
from engine.disk_cache.archive import ArchiveRules
from engine.disk_cache.cache import NO_DISK_CACHE, DiskCache, TieredCache
from engine.disk_cache.recalls import RecallRules
from engine.inbox import Inbox
from engine.loop import EngineLoop
from engine.output import OutputFactory
from engine.scheduler import Scheduler
from engine.sequence import LiveSequence
from engine.stats import loop_stats
from engine.step import SequenceId
from engine.storage_sizes import StorageBytes
from engine.submission import Submission, prepare
from engine.timing import Timing
from engine.types import (
    DiskWrites,
    FinishReason,
    OutputEvent,
    Request,
    SamplingParams,
    ThinkingBudget,
    Usage,
)
from engine.validation import Limits
from kvstore import invariants
from kvstore.block_pool import BlockPool
from kvstore.groups.group import Group
from kvstore.groups.recurrent import RecurrentGroup
from kvstore.groups.window import WindowGroup, lease_slots
from kvstore.prefix_index import NoIndex, PrefixIndex
from kvstore.radix_tree import RadixTree
from kvstore.store import KVStore
from tests.simulation.fairness import FairQueue
from tests.simulation.fake_runner import FakeRunner, InjectedError
from tests.simulation.fake_tier import FakeTier
from tests.simulation.model import Expected, expected, text_of
from tests.simulation.replay import Replay

EOS = 0
GRAMMARS = GrammarCompiler(lambda: LLTokenizer(""), frozenset({EOS}))  # for budgets alone
NO_BYTES = StorageBytes(block=0, slots=(), arenas=0)


class LetterDetokenizer:
    """One token, one letter."""

    def add(self, token_id: int) -> str:
        return text_of([token_id])

    def finish(self) -> str:
        return ""


class SilentTelemetry:
    """Nobody watches."""

    def step(self, seconds: float) -> None: ...

    def queue_wait(self, seconds: float) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def token_gap(self, seconds: float) -> None: ...

    def finished(self, seconds: float) -> None: ...


@dataclass(slots=True)
class Receiver:
    """What somebody who sent a request has received so far, by index."""

    request: Request
    sequences: list[LiveSequence]
    expected: list[Expected]
    token_ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    text: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    admissions: dict[int, Usage] = field(default_factory=dict)
    ends: dict[int, OutputEvent] = field(default_factory=dict)

    def receive(self, event: OutputEvent) -> None:
        assert event.index not in self.ends, "an event after the terminal one"
        if event.admission is not None:
            assert event.index not in self.admissions, "admitted for the first time again"
            self.admissions[event.index] = event.admission
        assert event.index in self.admissions or not event.token_ids, "a token before admission"
        self.token_ids[event.index] += event.token_ids
        self.text[event.index] += event.text
        if event.finish_reason is not None:
            self.ends[event.index] = event
            self._check_end(event)

    def _check_end(self, event: OutputEvent) -> None:
        expected = self.expected[event.index]
        token_ids, text = self.token_ids[event.index], self.text[event.index]
        assert token_ids == expected.token_ids[: len(token_ids)], "other tokens than when alone"
        assert expected.text.startswith(text), "other text than when alone"
        usage = event.usage
        assert usage is not None
        assert usage.prompt_tokens == len(self.request.prompt)
        assert usage.completion_tokens == len(token_ids)
        assert 0 <= usage.cached_tokens < usage.prompt_tokens
        admission = self.admissions.get(event.index, Usage(len(self.request.prompt), 0, 0))
        assert (admission.prompt_tokens, admission.cached_tokens, 0) == (
            usage.prompt_tokens,
            usage.cached_tokens,
            admission.completion_tokens,
        )
        if event.finish_reason in {FinishReason.STOP, FinishReason.LENGTH}:
            assert event.finish_reason is expected.finish_reason
            assert (token_ids, text) == (expected.token_ids, expected.text), "cut short"


class Simulation:
    """One daemon's life. `step` is one turn of the loop, with whatever happens around it."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.steps = 0
        self.receivers: dict[str, Receiver] = {}
        self._fault_rate = self.random.choice([0.0, 0.0, 0.01, 0.1])
        self._abort_rate = self.random.choice([0.0, 0.02, 0.1])
        self._arrival_rate = self.random.choice([0.1, 0.3, 0.8])
        self._max_tokens = self.random.choice([[0, 1, 2, 5], [5, 20], [30, 60]])
        self._client_weights = self.random.choice([[1], [1, 1, 1], [20, 1, 1, 1]])
        self._clear_rate = self.random.choice([0.0, 0.01, 0.05])
        self._build()
        self.replays = [
            Replay(self.store.index, Random(random_seed)) for random_seed in (seed, ~seed)
        ]
        self._prefixes = [self._tokens(1, 5 * self.block_size) for _ in range(4)]

    def _build(self) -> None:
        random = self.random
        self.block_size = random.choice([1, 2, 3, 4, 8])
        n_blocks = random.choice([6, 12, 24, 48])
        self.limits = Limits(
            vocab_size=random.choice([3, 5, 30]),
            max_context_tokens=random.choice([24, 60, 200]),
            arena_tokens=n_blocks * self.block_size,
            max_running=random.choice([1, 3, 8]),
            max_waiting=random.choice([4, 16]),
            step_tokens=random.choice([8, 9, 16, 64]),
            step_seconds=random.choice([inf, 0.9, 1.5]),  # a step takes a second
        )
        self.pool = BlockPool(n_blocks)
        index: PrefixIndex = RadixTree(self.pool, self.block_size)
        is_cached = random.random() < 0.9
        if not is_cached:
            index = NoIndex()
        self.store = KVStore(self.pool, index, self.block_size, self._groups(is_cached))
        self.runner = FakeRunner(
            self.pool,
            self.store.groups,
            self.block_size,
            self.limits.vocab_size,
            self._fault,
            self._row_fault,
        )
        self.outputs = OutputFactory(frozenset({EOS}), lambda _: LetterDetokenizer())
        self.inbox = Inbox()
        self.scheduler = Scheduler(
            self.store,
            self.outputs,
            self.limits,
            lambda: random.getrandbits(32),
            disk=self._disk(),
        )
        self.scheduler._admission.waiting = FairQueue(self.limits.max_waiting)
        timing = Timing(lambda: self.now, SilentTelemetry())
        masks = MaskFiller(self.limits.vocab_size)
        self.loop = EngineLoop(
            self.scheduler, self.runner, self.inbox, self._deliver, timing, NO_BYTES, masks
        )

    def _groups(self, is_cached: bool) -> list[Group]:
        """None, or up to two windows and recurrent states, with little room beyond the least."""
        random, limits = self.random, self.limits
        groups: list[Group] = []
        for _ in range(random.choice([0, 0, 1, 2])):
            window = random.choice([1, 2, 5, 12, 40])
            least = lease_slots(window, self.block_size, limits.step_tokens)
            leases = random.randint(1, limits.max_running)
            n_slots = least * leases + random.choice([0, 1, 10])
            groups.append(
                WindowGroup(len(groups), window, n_slots, self.block_size, limits.step_tokens)
            )
        if random.random() < 0.5:
            n_saved = random.choice([0, 1, 3, 20]) if is_cached else 0
            interval = random.choice([2, 7, 32])
            groups.append(RecurrentGroup(limits.max_running, n_saved, self.block_size, interval))
        return groups

    def _disk(self) -> DiskCache:
        """None, or one with a tier that may lose and damage what it has."""
        random = self.random
        self.tier = FakeTier(random, *random.choice([(0.0, 0.0), (0.02, 0.0), (0.1, 0.2)]))
        if random.random() < 0.4:
            return NO_DISK_CACHE
        least_tokens, size = random.choice([1, 2, 10]), self.block_size
        writes, salted = random.choice(list(DiskWrites)), random.random() < 0.5
        archive = ArchiveRules(
            writes=writes,
            salted=salted,
            least_tokens=least_tokens,
            idle_seconds=random.choice([0.0, 1.0, 5.0]),
            step_bytes=random.choice([1, 200, 1000]),
        )
        recalls = RecallRules(
            least_tokens=least_tokens,
            worth=inf,
            step_bytes=random.choice([1, 200, 1000]),
            timeout_seconds=random.choice([2.0, 20.0]),
            salted=salted,
        )
        n_windows = sum(isinstance(group, WindowGroup) for group in self.store.groups)
        part_bytes = (16 * size, *[8 * size] * n_windows, 8)
        return TieredCache(
            self.tier,
            self.store,
            part_bytes,
            0,
            self.inbox.post,
            archive,
            recalls,
            clock=lambda: self.now,
        )

    def step(self) -> None:
        """Let something happen, then turn the loop once and recount everything."""
        random = self.random
        if random.random() < self._arrival_rate:
            self.submit()
        if self.receivers and random.random() < self._abort_rate:
            self.loop.abort(random.choice(list(self.receivers)))
        if random.random() < self._clear_rate:
            self.store.clear(random.choice([None, self.scheduler.namespace("salt")]))
        if random.random() < self._clear_rate:
            namespace = random.choice([None, self.scheduler.namespace("")])
            self.scheduler.disk.clear(namespace)
        self.turn()

    def turn(self) -> None:
        self.now += 1.0
        self.tier.tick()
        problems = list(self.tier.problems())
        assert not problems, problems
        if not self.loop.is_idle:
            self.inbox.post(lambda: None)
            self.loop.turn()
            self.steps += 1
            assert self.loop.stats == loop_stats(self.scheduler, NO_BYTES), "published too early"
        invariants.check(self.store)
        for replay in self.replays:
            replay.step()
        if not self.scheduler.has_work:
            invariants.check_idle(self.store)

    def settle(self) -> None:
        """No more arrivals: everybody must come to an end, and leave nothing held."""
        self._fault_rate = 0.0
        turns_left = 200 + 40 * sum(s.request.max_tokens + 60 for s in self.loop.live())
        while not self.loop.is_idle:
            self.turn()
            turns_left -= 1
            assert turns_left > 0, "the sequences that are left make no progress"
        assert not self.receivers, "somebody never got the terminal events"
        for replay in self.replays:
            replay.finish()
        self.store.clear()
        assert self.pool.n_free == self.pool.n_blocks

    def submit(self) -> None:
        request = self._request()
        try:
            self.loop.submit(self._prepared(request), self.now)
        except (InvalidRequest, QueueFull):
            return
        sequences = [s for s in self.loop.live() if s.request is request]
        self.receivers[request.id] = Receiver(
            request, sequences, [self._expected(sequence) for sequence in sequences]
        )

    def _prepared(self, request: Request) -> Submission:
        return prepare(request, self.limits, GRAMMARS.guides, self.scheduler.names)

    def _expected(self, sequence: LiveSequence) -> Expected:
        stop_token_ids = self.outputs.stop_token_ids(sequence.request)
        return expected(sequence.request, sequence.seed, self.limits.vocab_size, stop_token_ids)

    def _request(self) -> Request:
        random = self.random
        most = min(self.limits.max_context_tokens, self.limits.arena_tokens)
        prompt = self._prompt()[: most if random.random() < 0.9 else None]
        max_tokens = random.choice(self._max_tokens)
        if random.random() < 0.9:
            max_tokens = min(max_tokens, most - len(prompt))
        return Request(
            id=str(random.getrandbits(64)),
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=SamplingParams(
                seed=random.choice([None, 1]),
                min_tokens=max(min(random.choice([0, 0, 3]), max_tokens), 0),
            ),
            stop=random.choice([(), (), ("ab",), ("ca", "b")]),
            ignore_eos=random.random() < 0.5,
            n=random.choice([1, 1, 1, 2, 4]),
            client=self._client(),
            priority=random.choice([0, 0, 0, -1, 1]),
            cache_salt=random.choice(["", "", "", "salt"]),
            prompt_logprobs=random.choice([None] * 9 + [1]),
            thinking_budget=self._thinking_budget(),
        )

    def _thinking_budget(self) -> ThinkingBudget | None:
        if self.random.random() < 0.7:
            return None
        return ThinkingBudget(self.random.choice([0, 1, 3, 9]), (), tuple(self._tokens(1, 3)))

    def _client(self) -> str:
        """One of several, of which the first may send most of what there is."""
        weights = self._client_weights
        return str(self.random.choices(range(len(weights)), weights)[0])

    def _prompt(self) -> list[int]:
        """Often the beginning of something seen before, so that prefixes meet and diverge."""
        random = self.random
        prompt = list(random.choice(self._prefixes))
        cut = random.randint(1, len(prompt))
        prompt = prompt[:cut] + self._tokens(0, 2 * self.block_size)
        if random.random() < 0.3:
            self._prefixes[random.randrange(len(self._prefixes))] = prompt
        return prompt

    def _tokens(self, least: int, most: int) -> list[int]:
        vocab_size = self.limits.vocab_size
        count = self.random.randint(least, max(least, most))
        return [self.random.randrange(vocab_size) for _ in range(count)]

    def _deliver(self, events: list[OutputEvent]) -> None:
        for event in events:
            assert event.error is None or "injected" in event.error, event.error
            receiver = self.receivers[event.request_id]
            receiver.receive(event)
            if event.finish_reason in {FinishReason.STOP, FinishReason.LENGTH}:
                self._check_cached_tokens(receiver.sequences[event.index])
            if event.prompt_logprobs is not None:
                assert len(event.prompt_logprobs) == len(receiver.request.prompt)
            if len(receiver.ends) == receiver.request.n:
                del self.receivers[event.request_id]

    def _check_cached_tokens(self, sequence: LiveSequence) -> None:
        """What was not reported as cached has been computed, each token once."""
        uncomputed = 1 if sequence.output_tokens else 0  # the last sampled token needs no KV
        computed = self.runner.computed_tokens.pop(sequence.id)
        if sequence.admissions == 1:
            assert sequence.cached_tokens + computed == len(sequence.tokens) - uncomputed

    def _fault(self) -> None:
        if self.random.random() < self._fault_rate:
            raise InjectedError("injected")

    def _row_fault(self, sequence_id: SequenceId) -> bool:
        return self.random.random() < self._fault_rate / 4


def run(seed: int, steps: int) -> int:
    """Simulate for about `steps` steps of one daemon; returns how many there were.

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
    return simulation.steps
