"""One model of the daemon: its state, and one period in memory."""

import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from anyio import CancelScope, Event

from engine.api import Engine
from engine.values.model import ModelCard
from engine.values.stats import EngineStats, Latencies, ModelMemory, no_latencies
from server.admin_schema import State
from server.generation.history import Replays
from server.generation.requests import ModelAlias, ServedModel, model_aliases
from server.models.policy import (
    Absent,
    Draining,
    Failed,
    Loading,
    Measuring,
    ModelState,
    Need,
    Queued,
    Ready,
    Unknown,
    need_of,
)
from server.settings.models import ModelSettings

FIRST_BACKOFF_SECONDS = 1.0
MOST_BACKOFF_SECONDS = 60.0
"""Before a model that has failed is loaded again: doubled each time, until it has served."""

PROGRESS_SECONDS = 5.0
"""Seconds between two lines of the log about the progress of a load."""

log = logging.getLogger("rootstock")


@dataclass(slots=True, eq=False)
class Lease:
    """One request's claim on a model: it waits for the model, then holds one stay in memory of it,
    and no later one.
    """

    key: str  # the name of the request's API key; empty without keys
    keep_seconds: float  # how long the model stays loaded after the request, as the request wishes
    answered: Event = field(default_factory=Event)
    loaded: "LoadedModel | None" = None
    error: Exception | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class LoadedModel:
    """A model in memory, from the end of its load on."""

    model: "Model"
    engine: Engine
    served: Mapping[str, ServedModel]  # by name
    leases: set[Lease] = field(default_factory=set)
    kept_until: dict[str, float] = field(default_factory=dict)
    """For each API key, the latest end of what its ended leases wished: end of use plus wish."""
    warming: CancelScope = field(default_factory=CancelScope)
    """Of the task that computes the prompts of `warm_prompts`."""
    has_served: bool = False  # a request, to its end
    has_ended: bool = False
    earlier_latencies: Latencies = field(init=False)  # of the engines that the model had before

    def __post_init__(self) -> None:
        self.earlier_latencies = self.model.latencies

    @property
    def keep_until(self) -> float:
        """When the last wish ends."""
        return max(self.kept_until.values(), default=-math.inf)

    def keep(self, key: str, until: float) -> None:
        """Add a wish. It shortens no earlier one."""
        self.kept_until[key] = max(self.kept_until.get(key, -math.inf), until)

    async def stats(self) -> EngineStats:
        """The engine's statistics. The model keeps them for when the engine has ended."""
        stats = await self.engine.stats()
        self.model.last_stats = stats
        self.model.latencies = {
            latency: histogram.plus(stats.latencies[latency])
            for latency, histogram in self.earlier_latencies.items()
        }
        return stats

    def forget_texts(self) -> None:
        """Forget the texts to embed or to rank that are kept to find prefixes in later ones."""
        for served in self.served.values():
            served.prefixes.clear()

    async def drain(self, timeout_seconds: float) -> None:
        """Let requests end, and free the memory. Errors are logged."""
        self.warming.cancel()
        try:
            await self.engine.drain(timeout_seconds)
            await self.stats()
        except Exception:
            log.exception("%s has not ended as it should", self.model.name)


class Model:
    """A model that requests can name, in memory or not. Times are of the pool's clock."""

    def __init__(self, settings: ModelSettings, *, is_pinned: bool = False) -> None:
        self.settings = settings
        self.is_pinned = is_pinned
        self.aliases = {alias.name: alias for alias in aliases_of(settings)}
        """By name: its own first, then its other names, then those of its adapters."""
        self.replays = {adapter: Replays() for adapter in ("", *settings.adapters)}
        self.card: ModelCard | None = None  # since it was first loaded
        self.planned: ModelMemory | None = None  # since it was measured, as one of several models
        self.latencies: Latencies = no_latencies()  # of all its engines
        self.last_stats: EngineStats | None = None  # of its last engine, as last read
        self.progress = ""  # how far fetching or loading is, in words
        self.fetched_share: float | None = None  # of its repository, while that is fetched
        self.state: ModelState = Unknown()
        self.loaded: LoadedModel | None = None  # while the state is Ready or Draining
        self.waiting: list[Lease] = []
        self.changed = Event()
        self._n_failures = 0  # in a row, until it has served
        self._logged_at = 0.0  # the last line on loading, by time.monotonic

    @property
    def name(self) -> str:
        """The model's own name."""
        return next(iter(self.aliases))

    @property
    def n_replays(self) -> int:
        """Number of remembered answers with tool calls."""
        return sum(map(len, self.replays.values()))

    @property
    def public_state(self) -> State:
        """The state as the API has it. A model that failed has failed until it is loaded again."""
        match self.state:
            case Loading():
                return State.LOADING
            case Ready():
                return State.READY
            case Draining():
                return State.DRAINING
            case _:
                return State.UNLOADED if self.failure is None else State.FAILED

    @property
    def failure(self) -> Failed | None:
        """Why the model is not in memory where it should be."""
        match self.state:
            case Failed():
                return self.state
            case Measuring(after=failure) | Queued(after=failure) | Loading(after=failure):
                return failure
            case _:
                return None

    @property
    def is_healthy(self) -> bool:
        """Whether the model serves, or would if it were requested. A load of several ranks may wait
        for some of them without end.
        """
        if self.loaded is not None:
            return self.loaded.engine.is_alive()
        if isinstance(self.state, Loading) and self.settings.engine.ranks > 1:
            return False
        return self.public_state is not State.FAILED

    @property
    def problem(self) -> str:
        """Why the model is not healthy: a predicate to its name."""
        reasons = [] if self.failure is None else [f"has failed: {self.failure.reason}"]
        if isinstance(self.state, Loading):
            reasons.append(f"is being loaded: {self.progress or 'its process starts'}")
        return "; ".join(reasons) or "has failed: its engine loop has stopped"

    @property
    def is_ready(self) -> bool:
        """Whether a request for the model need not wait."""
        return isinstance(self.state, Ready)

    @property
    def is_coming(self) -> bool:
        """Whether the model is on its way into memory: being measured, or loaded."""
        return isinstance(self.state, Measuring | Loading)

    def is_allowed(self, name: str, allowed: frozenset[str] | None) -> bool:
        """Whether an API key that allows these names may use this name of the model. A key that
        allows a model by any of its names may use all its names and adapters, and a key that allows
        an adapter may use that adapter. None allows all.
        """
        alias = self.aliases[name]
        return allowed is None or any(
            each.name in allowed
            for each in self.aliases.values()
            if each.root in {alias.root, alias.parent}
        )

    def progress_share(self, now: float) -> float | None:
        """The finished share of the download or load; None if unknown. A load that takes longer
        than the last one may take any time.
        """
        if not isinstance(self.state, Loading):
            return self.fetched_share
        seconds, last_seconds = now - self.state.began_at, self.state.need.load_seconds
        return seconds / last_seconds if self.card is not None and seconds < last_seconds else None

    def seconds_left(self, now: float) -> float | None:
        """The seconds until the idle model is unloaded; None: never."""
        if self.loaded is None or self.is_pinned:
            return None
        running = (lease.keep_seconds for lease in self.loaded.leases)
        seconds = max(self.loaded.keep_until - now, *running, 0.0)
        return None if math.isinf(seconds) else seconds

    def forget_replays(self) -> int:
        """Returns the number of answers that were forgotten."""
        return sum(replays.clear() for replays in self.replays.values())

    def report(self, line: str) -> None:
        """Keep a line on how loading goes as the progress, and log it. A line that ends in an
        ellipsis is logged only if nothing was logged for PROGRESS_SECONDS.
        """
        self.progress, now = line, time.monotonic()
        is_due = not line.endswith("…") or now - self._logged_at >= PROGRESS_SECONDS
        log.log(logging.INFO if is_due else logging.DEBUG, "%s: %s", self.name, line)
        if is_due:
            self._logged_at = now

    def report_fetched(self, done_bytes: int, total_bytes: int) -> None:
        """Keep the progress of a fetch. It is not logged: a terminal shows a bar of it."""
        self.progress = f"{done_bytes / 1e9:.2f} of {total_bytes / 1e9:.2f} GB fetched"
        self.fetched_share = min(done_bytes / total_bytes, 1.0) if total_bytes else None

    def become(self, state: ModelState) -> None:
        """Enter a state, and notify the tasks that wait for a change."""
        self.state = state
        self.notify()

    def notify(self) -> None:
        changed, self.changed = self.changed, Event()
        changed.set()

    def lease(self, key: str, keep_seconds: float | None) -> Lease:
        """A claim on the model. Without `keep_seconds`, the wish is the settings' `ttl_seconds`."""
        if keep_seconds is None:
            keep_seconds = self.settings.ttl_seconds
        return Lease(key, math.inf if keep_seconds is None else keep_seconds)

    def hold(self, lease: Lease, loaded: LoadedModel, now: float) -> None:
        """The lease holds the model from now on."""
        lease.loaded = loaded
        loaded.leases.add(lease)
        self._note_use(loaded, now)

    def release(self, lease: Lease, now: float) -> None:
        """End a lease that holds the model, or that waits for it."""
        if lease.loaded is not None:
            loaded = lease.loaded
            loaded.has_served = True
            loaded.leases.remove(lease)
            loaded.keep(lease.key, now + lease.keep_seconds)
            self._note_use(loaded, now)
        elif lease in self.waiting:
            self.waiting.remove(lease)
            if not self.waiting:
                self._leave_queue()

    def withdraw(self, key: str) -> None:
        """Drop the wishes of an API key: of its ended, its running and its waiting requests."""
        leases = list(self.waiting)
        if self.loaded is not None:
            self.loaded.kept_until.pop(key, None)
            leases += self.loaded.leases
        for lease in leases:
            if lease.key == key:
                lease.keep_seconds = 0.0
        if isinstance(self.state, Ready) and self.loaded is not None:
            self.become(replace(self.state, keep_until=self.loaded.keep_until))

    def begin_measuring(self) -> bool:
        """Whether the need is to be measured now: it is not known, and is not being measured."""
        match self.state:
            case Unknown():
                self.become(Measuring())
            case Failed(need=None) as failure:
                self.become(Measuring(after=failure))
            case _:
                return False
        return True

    def measured(self, need_bytes: int) -> None:
        """The need is known."""
        need, failure = Need(need_bytes, is_pinned=self.is_pinned), self.failure
        self.become(Absent(need) if failure is None else replace(failure, need=need))

    def queue(self, now: float) -> None:
        """A request waits for the model, whose need is known."""
        match self.state:
            case Absent(need):
                self.become(Queued(need, now))
            case Failed(need=Need() as need) as failure:
                self.become(Queued(need, now, after=failure))
            case Draining(queued_since=None) as draining:
                self.become(replace(draining, queued_since=now))

    def enter(self, loaded: LoadedModel, now: float) -> None:
        """Loading has ended. All leases that wait hold the model at once: without a lease it may be
        unloaded again. If no request waits any more, the load counts as a use without a wish of its
        own.
        """
        assert isinstance(self.state, Loading), "only a model that is being loaded enters memory"
        need = replace(self.state.need, load_seconds=now - self.state.began_at)
        self.loaded = loaded
        waiting, self.waiting = self.waiting, []
        if not waiting:
            loaded.keep("", now + self.lease("", None).keep_seconds)
        self.become(Ready(need, now, loaded.keep_until))
        for lease in waiting:
            self.hold(lease, loaded, now)
            lease.answered.set()

    def leave(self) -> None:
        """A model that drained is no longer in memory."""
        assert isinstance(self.state, Draining), "only a model that drains leaves memory"
        need, since = self.state.need, self.state.queued_since
        self.loaded, self._n_failures = None, 0
        self.become(Absent(need) if since is None else Queued(need, since))

    def fail(self, reason: str, now: float) -> float:
        """The model cannot be measured or loaded, or its process has died. Returns the seconds
        until it may be loaded again: at once if it has served.
        """
        has_served = self.loaded is not None and self.loaded.has_served
        self._n_failures = 0 if has_served else self._n_failures + 1
        backoff_seconds = _backoff_seconds(self._n_failures)
        self.loaded = None
        self.become(Failed(need_of(self.state), reason, now + backoff_seconds))
        return backoff_seconds

    def forget_failure(self) -> None:
        """A model that has failed may be loaded again at once."""
        self._n_failures = 0
        match self.state:
            case Failed(need=None):
                self.become(Unknown())
            case Failed(need=Need() as need):
                self.become(Absent(need))
            case Measuring() | Queued() as state:
                self.become(replace(state, after=None))

    def refuse(self, error: Exception) -> None:
        """Raise the error to all requests that wait for the model."""
        waiting, self.waiting = self.waiting, []
        self._leave_queue()
        for lease in waiting:
            lease.error = error
            lease.answered.set()

    def _leave_queue(self) -> None:
        """No request waits any more."""
        match self.state:
            case Queued(need, after=failure):
                self.become(failure or Absent(need))
            case Draining() as draining:
                self.become(replace(draining, queued_since=None))

    def _note_use(self, loaded: LoadedModel, now: float) -> None:
        if loaded is self.loaded and isinstance(self.state, Ready):
            need, n_leases = self.state.need, len(loaded.leases)
            self.become(Ready(need, now, loaded.keep_until, n_leases))
        else:
            self.notify()


def aliases_of(settings: ModelSettings) -> tuple[ModelAlias, ...]:
    """The names of the model with these settings, its own first, then the names of its adapters."""
    names = settings.served_model_name or (public_name(settings.source),)
    return model_aliases(names, settings.adapters)


def public_name(model: str) -> str:
    """A repository's name as it is; of a directory the last component."""
    path = Path(model).expanduser()
    return Path(os.path.abspath(path)).name if path.is_dir() else model  # a link keeps its own


def _backoff_seconds(n_failures: int) -> float:
    if not n_failures:
        return 0.0
    return min(FIRST_BACKOFF_SECONDS * 2.0 ** min(n_failures - 1, 16), MOST_BACKOFF_SECONDS)
