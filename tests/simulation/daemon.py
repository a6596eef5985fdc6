"""One engine from its start to its end: the real loop, scheduler and store on what is fake."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from math import inf
from random import Random
from typing import TypeVar

from engine.core.inbox import Inbox
from engine.core.loop import Deliver, EngineLoop
from engine.core.metrics import Metrics
from engine.core.request import PreparedRequest
from engine.core.scheduler import Scheduler
from engine.core.step import Limits, SequenceId
from engine.disk_cache.cache import DiskCache
from engine.disk_cache.loader import DiskLoader, LoadRules, _Load
from engine.disk_cache.transfers import LoadLimits
from engine.disk_cache.writer import DiskWriter, WriteRules
from engine.grammar.stage import GrammarStage
from engine.output.text import output_factory
from engine.values.images import ImageInput
from engine.values.request import Request
from engine.values.settings import DiskWrites
from engine.values.stats import DecodeStats, MemoryStats, ModelMemory
from kvstore.pool import BlockPool
from kvstore.recurrent import RecurrentGroup, RoundedGroup
from kvstore.sizes import StorageBytes
from kvstore.slots import Group
from kvstore.store import KVStore
from kvstore.window import WindowGroup, lease_slots
from tests.simulation.census import Census
from tests.simulation.checks import fairness
from tests.simulation.checks.tree import WatchedTree
from tests.simulation.cutting_scheduler import CuttingScheduler
from tests.simulation.fake_runner import FakeRunner, Launching
from tests.simulation.grammars import EOS, LateAnswers, plan_of
from tests.simulation.model import ADAPTERS, MAX_IMAGE_TOKENS, image_input, text_of
from tests.simulation.troubled_store import TroubledStore

NO_BYTES = StorageBytes(block=0, slots=(), arenas=0)
NO_DECODE = DecodeStats("eager: nothing is computed", 0, 0)
NO_MEMORY = MemoryStats(ModelMemory(0, 0, 0, 0, 0, 0), 0, 0, 0)

T = TypeVar("T")


class LetterDetokenizer:
    """One token, one letter."""

    def add(self, token_id: int) -> str:
        return text_of([token_id])

    def finish(self) -> str:
        return ""


class Mailbox(Inbox):
    """Calls must not fail: here nobody looks at their results."""

    def __init__(self) -> None:
        super().__init__()
        self._answers: list[Future[object]] = []

    @property
    def is_empty(self) -> bool:
        return not self._answers

    def post(self, function: Callable[[], T], *, urgent: bool = False) -> Future[T]:
        answer = super().post(function, urgent=urgent)
        self._answers.append(answer)  # type: ignore[arg-type]
        return answer

    def check(self) -> None:
        """Raises what a call has raised."""
        for answer in self._answers:
            if answer.done():
                answer.result()
        self._answers = [answer for answer in self._answers if not answer.done()]


_ROUNDED_EVERY = {0.05: 2, 0.1: 7, 0.15: 32}
"""Tokens between two roundings of a state, by the share of simulated machines up to it."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a disk's bytes depend on: the same for all engines that use it."""

    vocab_size: int
    block_size: int
    windows: tuple[int, ...]
    has_states: bool
    rounded_every: int | None = None  # how many tokens, where states are saved in less precision
    n_blocks: tuple[int, ...] = (6, 10, 20, 48)  # of an engine's arena: one of these
    context_tokens: tuple[int, ...] = (24, 60, 200)  # of an engine: one of these
    takes_images: bool = False
    has_whole_images: bool = False

    @classmethod
    def draw(cls, random: Random) -> "Layout":
        return cls(
            vocab_size=random.choice([3, 5, 30]),
            block_size=random.choice([1, 2, 3, 4, 8]),
            windows=tuple(
                random.choice([1, 2, 5, 12, 40]) for _ in range(random.choice([0, 0, 1, 2]))
            ),
            has_states=(states := random.random()) < 0.5,
            rounded_every=next((n for most, n in _ROUNDED_EVERY.items() if states < most), None),
        )

    def with_images(self, random: Random, share: float) -> "Layout":
        """A share of the layouts take images, in half of these computed as a whole if they can."""
        if random.random() >= share:
            return self
        is_whole = not self.has_states and random.random() < 0.6
        return replace(self, takes_images=True, has_whole_images=is_whole)

    @property
    def part_bytes(self) -> tuple[int, ...]:
        return (16 * self.block_size, *[8 * self.block_size] * len(self.windows), 16)


@dataclass(frozen=True, slots=True)
class World:
    """What is around an engine: the time, those who listen, and what goes wrong."""

    clock: Callable[[], float]
    deliver: Deliver
    fault: Callable[[], None]
    row_fault: Callable[[SequenceId], bool]
    answer_fault: Callable[[], bool]
    launching: Launching
    op_fault: Callable[[], None]
    image_fault: Callable[[], bool]


class Daemon:
    """One engine. Sizes and rules are drawn anew for each."""

    def __init__(
        self,
        random: Random,
        layout: Layout,
        world: World,
        tier: TroubledStore | None,
        census: Census,
    ) -> None:
        self._random = random
        self._layout = layout
        self.clock = world.clock
        n_blocks = random.choice(layout.n_blocks)
        self.limits = _limits(random, layout, n_blocks)
        self.pool = BlockPool(n_blocks)
        is_cached = tier is not None or random.random() < 0.8
        tree: WatchedTree | None = None
        if is_cached:
            tree = WatchedTree(self.pool, layout.block_size, hashes_blocks=tier is not None)
        self.store = KVStore(self.pool, tree, layout.block_size, self._groups(is_cached))
        self.runner = FakeRunner(
            self.pool,
            self.store.groups,
            layout.block_size,
            layout.vocab_size,
            world.fault,
            world.row_fault,
            world.launching,
            world.op_fault,
            self.limits.images,
            world.image_fault,
        )
        self.sizes = StorageBytes(block=0, slots=(0,) * len(self.store.groups), arenas=0)
        self.part_bytes = layout.part_bytes
        self.new_output = output_factory(frozenset({EOS}), lambda _: LetterDetokenizer())
        self.inbox = Mailbox()
        self.loader: DiskLoader | None = None
        self.writer: DiskWriter | None = None
        disk = None if tier is None else self._disk(tier)
        self.scheduler: Scheduler = CuttingScheduler(
            random, census, self.store, self.new_output, self.limits, Metrics(world.clock), disk
        )
        fairness.watch(self.scheduler, census)
        self.loop = EngineLoop(
            self.scheduler,
            self.runner,
            self.inbox,
            world.deliver,
            self.sizes,
            GrammarStage(
                self.scheduler,
                LateAnswers(random, layout.vocab_size, world.answer_fault, census),
                self.clock,
            ),
        )

    def prepared(self, request: Request) -> PreparedRequest:
        """Raises InvalidRequest."""
        return self.scheduler.prepare(request, plan_of(request))

    @property
    def loads(self) -> list[_Load]:
        """Those under way."""
        return [] if self.loader is None else self.loader._loads

    @property
    def in_flight(self) -> int:
        """The number of the step that is being computed, 0 when there is none."""
        return 0 if self.loop.in_flight is None else self.loop.in_flight.plan.number

    @property
    def wants_sleep(self) -> bool:
        """Whether the next turn would begin by waiting for a call, as long as the disk allows."""
        return self.loop.is_idle or self.loop.waits_for_disk

    def _groups(self, is_cached: bool) -> list[Group]:
        """With little room beyond the least."""
        random, limits, size = self._random, self.limits, self._layout.block_size
        groups: list[Group] = []
        for window in self._layout.windows:
            least = lease_slots(window, size, limits.step_tokens)
            leases = random.randint(1, limits.max_running)
            n_slots = least * leases + random.choice([0, 1, 10])
            groups.append(WindowGroup(len(groups), window, n_slots, size, limits.step_tokens))
        if self._layout.has_states:
            n_saved = random.choice([0, 1, 3, 20, 20]) if is_cached else 0
            kind, interval = RecurrentGroup, random.choice([2, 7, 32])
            if self._layout.rounded_every is not None:
                kind, interval = RoundedGroup, self._layout.rounded_every
            groups.append(kind(limits.max_running, n_saved, size, interval))
        return groups

    def _disk(self, tier: TroubledStore) -> DiskCache:
        random = self._random
        write_rules, load_rules = draw_rules(random)
        disk = DiskCache(
            tier,
            self.store,
            self._layout.part_bytes,
            0,
            self.inbox.post,
            write_rules,
            load_rules,
            shutdown_seconds=random.choice([0.0, 5.0, 60.0]),
            clock=self.clock,
        )
        self.loader, self.writer = disk._loader, disk._writer
        return disk


def draw_rules(random: Random) -> tuple[WriteRules, LoadRules]:
    least_tokens, salted = random.choice([1, 2, 6]), random.random() < 0.7
    write_rules = WriteRules(
        writes=random.choice([*DiskWrites, *[DiskWrites.ALL] * 4]),
        salted=salted,
        least_tokens=least_tokens,
        idle_seconds=random.choice([0.0, 1.0, 4.0]),
    )
    load_rules = LoadRules(
        least_tokens=least_tokens,
        worth=random.choice([inf, inf, 0.7]),
        looked_back_blocks=random.choice([0, 1, 64]),
        timeout_seconds=random.choice([1.0, 3.0, 20.0]),
        most_seconds=random.choice([1.0, 30.0]),
        patience=random.choice([0.0, 0.1, 1.0]),
        salted=salted,
        limits=LoadLimits(random.choice([1, 200, 1 << 30]), random.choice([10, 1000, 1 << 30])),
    )
    return write_rules, load_rules


def _limits(random: Random, layout: Layout, n_blocks: int) -> Limits:
    return Limits(
        vocab_size=layout.vocab_size,
        max_context_tokens=random.choice(layout.context_tokens),
        arena_tokens=n_blocks * layout.block_size,
        max_running=random.choice([1, 3, 8]),
        max_waiting=random.choice([4, 16]),
        step_tokens=random.choice([8, 9, 16, 64]),
        step_stretch=random.choice([inf, 1.0, 1.5, 4.0]),
        adapters=frozenset(ADAPTERS),
        pools=True,
        images=_images(random, layout),
    )


def _images(random: Random, layout: Layout) -> ImageInput | None:
    """With room for the features of one image, or of few."""
    if not layout.takes_images:
        return None
    return image_input(layout.vocab_size, MAX_IMAGE_TOKENS + random.choice([0, 0, 5, 20]))
