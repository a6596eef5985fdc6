"""The engine without threads or HTTP: a checkpoint's model under the real scheduler and store."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engine.constraints.guide import FreeGuide, GuideFactory
from engine.constraints.remote.answers import Answers
from engine.core.metrics import LatencyTracker
from engine.core.pipeline import Pipeline
from engine.core.request import Limits, Namespaces, prepare
from engine.core.scheduler import Scheduler
from engine.core.step import ModelRunner, Vector
from engine.disk_cache.cache import NO_DISK_CACHE, DiskCache
from engine.drafts.proposer import AcceptanceRates, DraftMaker, LiveSpeculation, SequenceRates
from engine.measuring.telemetry import SilentTelemetry
from engine.mlx_backend.assembly import attentions
from engine.mlx_backend.attention.strategy import Attention
from engine.mlx_backend.launch import Launch
from engine.mlx_backend.loading.loader import LoadedModel, load_weights, open_model
from engine.mlx_backend.model.cached_model import CachedModel, Execution
from engine.mlx_backend.model.layout import Layout
from engine.mlx_backend.runner import MlxRunner
from engine.mlx_backend.sampling.sampler import Sampler
from engine.mlx_backend.storage.storage import Storage
from engine.output.text import OutputFactory
from engine.values.output import OutputEvent, Usage
from engine.values.request import Request
from engine.values.settings import AdapterConfig
from kvstore import invariants
from kvstore.pool import BlockPool
from kvstore.sizes import StateCounts, StorageSizes, WindowSize, build_groups
from kvstore.store import KVStore
from kvstore.tree import RadixTree
from kvstore.window import lease_slots
from tests.devices import SERVING_LAUNCH
from tests.grammars import NoAnswers
from tests.simulation.daemon import LetterDetokenizer


@dataclass(frozen=True, slots=True)
class Served:
    """A checkpoint's model as the daemon loads it, and how its rows share forwards."""

    loaded: LoadedModel
    execution: Execution

    @property
    def layout(self) -> Layout:
        return self.loaded.layout


def load(
    checkpoint: Path, memory_bytes: int = 1 << 30, adapters: Sequence[AdapterConfig] = ()
) -> Served:
    """Raises ModelError, as the daemon does, when the model cannot be served."""
    loaded = open_model(checkpoint, memory_bytes, adapter_configs=adapters)
    execution = load_weights(loaded, attentions("auto", loaded), lambda line: None)
    return Served(loaded, execution)


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine is given. Every group has room for `max_running` sequences and `spare` more.

    A spare is the window of a sequence that has ended, or a saved state.
    """

    n_blocks: int
    block_size: int = 8
    max_running: int = 8
    step_tokens: int = 32
    spare: int = 24

    def sizes(self, layout: Layout) -> StorageSizes:
        return StorageSizes(
            self.n_blocks,
            tuple(
                WindowSize(window, (self.max_running + self.spare) * self._lease_slots(window))
                for window in layout.windows
            ),
            StateCounts(self.max_running, self.spare) if layout.states else None,
        )

    def _lease_slots(self, window: int) -> int:
        return lease_slots(window, self.block_size, self.step_tokens)


def cached_model(served: Served, attention: Attention, room: Room) -> CachedModel:
    """The model over storage of its own."""
    storage = Storage(served.layout, room.sizes(served.layout), room.block_size)
    execution = replace(served.execution, attention=attention)
    return CachedModel(served.loaded.model, served.layout, storage, execution)


def new_store(served: Served, room: Room, pool: BlockPool) -> KVStore:
    """A store with the model's groups, sharing prefixes."""
    groups = build_groups(room.sizes(served.layout), room.block_size, room.step_tokens)
    return KVStore(pool, RadixTree(pool, room.block_size), room.block_size, groups)


class OfflineDaemon:
    """Requests in, all their tokens out, with the store recounted after every step."""

    def __init__(
        self,
        served: Served,
        attention: Attention,
        room: Room,
        watch: Callable[[ModelRunner], ModelRunner] = lambda runner: runner,
        disk: Callable[[KVStore, Storage], DiskCache] = lambda store, storage: NO_DISK_CACHE,
        answers: Callable[[int], Answers] = NoAnswers,
        clock: Callable[[], float] = time.monotonic,
        launch: Launch = SERVING_LAUNCH,
    ) -> None:
        """`answers` is given the size of the vocabulary."""
        vocab_size = served.layout.vocab_size
        model = cached_model(served, attention, room)
        self.runner = watch(MlxRunner(model, Sampler(vocab_size), launch))
        self.store = new_store(served, room, BlockPool(room.n_blocks))
        self._limits = Limits(
            vocab_size,
            served.loaded.max_context_tokens,
            room.n_blocks * room.block_size,
            room.max_running,
            64,
            room.step_tokens,
            adapters=frozenset(served.loaded.adapters),
            pools=True,
        )
        self.scheduler = Scheduler(
            self.store,
            OutputFactory(frozenset(), lambda _: LetterDetokenizer()),
            self._limits,
            draw_seed=lambda: 0,
            namespaces=Namespaces(fingerprints=served.loaded.adapters),
            disk=disk(self.store, model.storage),
        )
        self.pipeline = Pipeline(
            self.scheduler,
            self.runner,
            answers(vocab_size),
            LatencyTracker(clock, SilentTelemetry()),
        )
        self.usage: dict[str, Usage] = {}
        self.vectors: dict[str, Vector] = {}

    def serve(self, *requests: Request) -> Mapping[tuple[str, int], Sequence[int]]:
        """Tokens by request id and index, all requests at once."""
        said = defaultdict[tuple[str, int], list[int]](list)
        for request in requests:
            self.add(request)
        return self.rest(said)

    def rest(
        self, said: defaultdict[tuple[str, int], list[int]]
    ) -> Mapping[tuple[str, int], Sequence[int]]:
        """The same of what has been added."""
        while self.scheduler.has_work or not self.pipeline.is_empty:
            self._step(said)
        return said

    def add(self, request: Request, new_guide: GuideFactory = FreeGuide) -> None:
        self.scheduler.add(prepare(request, self._limits, new_guide, self.scheduler.block_hashes))

    def speculate(self, request_id: str, *drafters: DraftMaker) -> None:
        """Have the sequences of a request that waits drafted, each by one of these."""
        sequences = [s for s in self.scheduler.waiting if s.request.id == request_id]
        for sequence, drafter in zip(sequences, drafters, strict=True):
            rates = SequenceRates(AcceptanceRates())
            sequence.speculation = LiveSpeculation(drafter, rates)

    def step(self, n_steps: int) -> None:
        """Compute so many steps of what has been added; what is said is lost."""
        for _ in range(n_steps):
            self._step(defaultdict(list))

    def turn(self) -> list[OutputEvent]:
        """One step more is submitted, and the one before is collected."""
        news = self.pipeline.collect_early()
        news += self.pipeline.advance(self.scheduler.plan())
        return news + (self.pipeline.sample() or [])

    def _step(self, said: dict[tuple[str, int], list[int]]) -> None:
        for event in self.turn():
            assert event.error is None
            said[event.request_id, event.index] += event.token_ids
            if event.pooled:
                self.vectors[event.request_id] = np.frombuffer(event.pooled, "<f4")
            if event.usage and event.index == 0:
                self.usage[event.request_id] = event.usage
        invariants.check(self.store)
