"""A model that requests can name, and one that is in memory."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.api import Engine
from engine.values.model import ModelCard
from engine.values.stats import EngineStats, Latencies, no_latencies
from server.cache_feed import CacheFeed
from server.generation.models import Naming, ServedModel
from server.generation.replays import Replays
from server.settings.models import ModelSettings

log = logging.getLogger("rootstock")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory. Implements `server.pool.pooled_model.Resident`."""

    engine: Engine
    served: Mapping[str, ServedModel]  # by name
    feed: CacheFeed
    known: "KnownModel"
    earlier_latencies: Latencies  # of the engines that the model had before

    async def stats(self) -> EngineStats:
        """The engine's statistics. The model keeps them, so that they stand when it has ended."""
        stats = await self.engine.stats()
        self.known.last_stats = stats
        self.known.latencies = {
            latency: histogram.plus(stats.latencies[latency])
            for latency, histogram in self.earlier_latencies.items()
        }
        return stats

    async def ended(self) -> str:
        return await self.engine.ended()

    async def drain(self, timeout_seconds: float) -> None:
        try:
            await self.engine.drain(timeout_seconds)
            await self.stats()
        except Exception:
            log.exception("%s has not ended as it should", self.known.name)


@dataclass(slots=True)
class KnownModel:
    """What is known of a model whether or not it is loaded, and outlives its unloading."""

    settings: ModelSettings
    namings: Sequence[Naming]  # its own first, then its aliases, then its adapters'
    replays: Mapping[str, Replays]  # by adapter
    latencies: Latencies = field(default_factory=no_latencies)  # of all its engines
    card: ModelCard | None = None  # since it was first loaded
    last_stats: EngineStats | None = None  # of its last engine, as last read
    progress: str = ""  # the last word on how fetching or loading goes
    fetched_share: float | None = None  # of its repository, while that is fetched

    @property
    def name(self) -> str:
        """Its own."""
        return self.namings[0].name

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(naming.name for naming in self.namings)

    @property
    def n_replays(self) -> int:
        return sum(map(len, self.replays.values()))

    def forget_replays(self) -> int:
        """Returns how many answers there were."""
        return sum(replays.clear() for replays in self.replays.values())

    def report(self, line: str) -> None:
        self.progress = line
        log.info("%s: %s", self.name, line)

    def fetching(self, done_bytes: int, total_bytes: int) -> None:
        """A terminal has a bar of it."""
        self.progress = f"{done_bytes / 1e9:.2f} of {total_bytes / 1e9:.2f} GB fetched"
        self.fetched_share = min(done_bytes / total_bytes, 1.0) if total_bytes else None
