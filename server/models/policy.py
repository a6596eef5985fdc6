"""Decides which models are loaded and unloaded: a pure function of their states, the budget and
time.

Loads are FIFO with head-of-line blocking, so small models cannot starve a large one. Memory is
freed before it is used. Times are of one clock, in seconds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

UNKNOWN_LOAD_SECONDS = 5.0
"""Assumed of a model that has never been loaded here."""


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that a loaded model takes. Only a model whose need is known can be loaded."""

    bytes: int
    load_seconds: float = UNKNOWN_LOAD_SECONDS  # that the last load took
    is_pinned: bool = False  # never unloaded for others nor for its age; loaded again if it dies


@dataclass(frozen=True, slots=True)
class Failed:
    """The model could not be loaded, or its process has died. `need` is None if measuring it
    failed.
    """

    need: Need | None
    reason: str
    retry_at: float  # it is not loaded before


@dataclass(frozen=True, slots=True)
class Unknown:
    """The model is not in memory, and its need has not been measured."""


@dataclass(frozen=True, slots=True)
class Measuring:
    """The need of the model is being measured. `after` is the failure that this attempt follows."""

    after: Failed | None = None


@dataclass(frozen=True, slots=True)
class Absent:
    """The model is not in memory, and no request waits for it."""

    need: Need


@dataclass(frozen=True, slots=True)
class Queued:
    """The model is not in memory, and requests have waited for it since `since`. `after` is the
    failure that this attempt follows.
    """

    need: Need
    since: float
    after: Failed | None = None


@dataclass(frozen=True, slots=True)
class Loading:
    """The model is being loaded. `after` is the failure that this attempt follows."""

    need: Need
    began_at: float
    after: Failed | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is in memory, and `n_leases` requests use it."""

    need: Need
    used_at: float  # when it was loaded, or a lease last began or ended
    keep_until: float = math.inf  # without leases it is unloaded then; infinite: never for its age
    n_leases: int = 0


@dataclass(frozen=True, slots=True)
class Draining:
    """The model is unloaded when its leases have ended. New requests wait for it to be loaded
    again, since `queued_since`.
    """

    need: Need
    queued_since: float | None = None


Resident: TypeAlias = Loading | Ready | Draining
"""A model in one of these states has a process, and so takes memory."""

ModelState: TypeAlias = Unknown | Measuring | Absent | Queued | Resident | Failed
Models: TypeAlias = Mapping[str, ModelState]
Residents: TypeAlias = Mapping[str, Resident]


@dataclass(frozen=True, slots=True)
class Load:
    """Begin to load the model with the memory that it needs."""

    name: str
    need: Need


@dataclass(frozen=True, slots=True)
class Unload:
    """Let the model drain: it is gone when the last of its leases has ended."""

    name: str


Action: TypeAlias = Load | Unload


def decide(models: Models, budget_bytes: int, now: float) -> list[Action]:
    """The actions to start now."""
    resident = {name: model for name, model in models.items() if isinstance(model, Resident)}
    aged = [name for name, model in models.items() if _ends_at(model) <= now]
    staying = {
        name: model
        for name, model in resident.items()
        if name not in aged and not isinstance(model, Draining)
    }
    free_bytes = budget_bytes - _total_bytes(resident)
    draining_bytes = _total_bytes(resident) - _total_bytes(staying)
    actions: list[Action] = [Unload(name) for name in aged]
    for name, model in _queue(models, now).items():
        if model.need.bytes > free_bytes:
            missing_bytes = model.need.bytes - free_bytes - draining_bytes
            victims = _victims(_evictable(staying, models[name], now), missing_bytes)
            return actions + [Unload(victim) for victim in victims]
        free_bytes -= model.need.bytes
        actions.append(Load(name, model.need))
    overdrawn = _victims(_idle(staying), -free_bytes - draining_bytes)
    return actions + [Unload(name) for name in overdrawn]


def next_due(models: Models, now: float) -> float:
    """When `decide` may next decide something else although nothing happens; infinite if never."""
    times = [_ends_at(model) for model in models.values()]
    times += [model.retry_at for model in models.values() if isinstance(model, Failed)]
    times += [
        queued.since + eviction_grace_seconds(queued.need, victim.need)
        for queued in models.values()
        if isinstance(queued, Queued)
        for victim in models.values()
        if isinstance(victim, Ready)
    ]
    return min((time for time in times if time > now), default=math.inf)


def need_of(model: ModelState) -> Need | None:
    """The model's need; None if it is unknown."""
    return None if isinstance(model, Unknown | Measuring) else model.need


def can_ever_fit(models: Models, name: str, need: Need, budget_bytes: int) -> bool:
    """Whether a model with this name and need fits next to the pinned ones, which never leave."""
    needs = (need_of(model) for other, model in models.items() if other != name)
    pinned_bytes = sum(other.bytes for other in needs if other is not None and other.is_pinned)
    return need.bytes + pinned_bytes <= budget_bytes


def fits_now(models: Models, need: Need, budget_bytes: int) -> bool:
    """Whether the need fits next to all resident models. With none of these it always does."""
    resident = {name: model for name, model in models.items() if isinstance(model, Resident)}
    return not resident or _total_bytes(resident) + need.bytes <= budget_bytes


def idlest(models: Models) -> str | None:
    """The least recently used of the loaded models that no request uses and that are not pinned;
    None if there is none.
    """
    resident = {name: model for name, model in models.items() if isinstance(model, Resident)}
    return next(iter(_idle(resident)), None)


def eviction_grace_seconds(queued: Need, victim: Need) -> float:
    """The time that a model queues before one in use is unloaded for it: the time to load both, so
    that alternating models spend no more time on loading than on serving.
    """
    return queued.load_seconds + victim.load_seconds


def _ends_at(model: ModelState) -> float:
    """When the model is unloaded for its age."""
    return model.keep_until if isinstance(model, Ready) and _is_idle(model) else math.inf


def _is_idle(model: Ready) -> bool:
    """Whether the model may be unloaded without delay."""
    return not model.n_leases and not model.need.is_pinned


def _total_bytes(models: Residents) -> int:
    return sum(model.need.bytes for model in models.values())


def _queue(models: Models, now: float) -> dict[str, Queued]:
    """The models to load, in the order of arrival. A pinned model that failed arrives by itself
    when it may be loaded again.
    """
    queue = {name: model for name, model in models.items() if isinstance(model, Queued)}
    for name, model in models.items():
        match model:
            case Failed(need=Need(is_pinned=True) as need) if model.retry_at <= now:
                queue[name] = Queued(need, model.retry_at)
    return dict(sorted(queue.items(), key=lambda item: (item[1].since, item[0])))


def _victims(candidates: Residents, missing_bytes: int) -> Sequence[str]:
    """The fewest candidates, from the first on, that free `missing_bytes`; none if all of them are
    not enough.
    """
    if not 0 < missing_bytes <= _total_bytes(candidates):
        return ()
    chosen: list[str] = []
    for name, model in candidates.items():
        if missing_bytes > 0:
            chosen.append(name)
            missing_bytes -= model.need.bytes
    return _without_needless(chosen, candidates, -missing_bytes)


def _evictable(staying: Residents, model: ModelState, now: float) -> Residents:
    """The models that may go for this one: the idle ones first, then those in use if requests have
    waited for it long enough. A pinned model that failed has no requests that wait.
    """
    busy = {
        name: victim
        for name, victim in staying.items()
        if isinstance(victim, Ready) and victim.n_leases and not victim.need.is_pinned
        if isinstance(model, Queued)
        and now >= model.since + eviction_grace_seconds(model.need, victim.need)
    }
    return {**_idle(staying), **_by_last_use(busy)}


def _idle(staying: Residents) -> Residents:
    return _by_last_use(
        {
            name: model
            for name, model in staying.items()
            if isinstance(model, Ready) and _is_idle(model)
        }
    )


def _by_last_use(models: Mapping[str, Ready]) -> dict[str, Ready]:
    """The least recently used first."""
    return dict(sorted(models.items(), key=lambda item: item[1].used_at))


def _without_needless(chosen: Sequence[str], models: Residents, spare_bytes: int) -> list[str]:
    """The chosen models without those whose memory the others make needless, the last first."""
    kept: list[str] = []
    for name in reversed(chosen):
        if models[name].need.bytes <= spare_bytes:
            spare_bytes -= models[name].need.bytes
        else:
            kept.append(name)
    return kept[::-1]
