"""Which models are loaded and which must go: a pure function of the pool, the budget and the clock.

Who waits is served in the order of arrival, and nobody is loaded past the first that has no room:
a large model would else wait for ever behind small ones. Room is made before it is used.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from server.pool.states import Measuring, ModelState, State


@dataclass(frozen=True, slots=True)
class Load:
    name: str


@dataclass(frozen=True, slots=True)
class Unload:
    """Let it drain: it is gone when the last of its requests has ended."""

    name: str


Action: TypeAlias = Load | Unload
Models: TypeAlias = Mapping[str, ModelState]


def decide(models: Models, budget_bytes: int, now: float) -> list[Action]:
    """What is to be begun at once."""
    aged = [name for name, model in models.items() if _ends_at(model) <= now]
    resident = {name: model for name, model in models.items() if model.is_resident}
    staying = {
        name: model
        for name, model in resident.items()
        if name not in aged and model.state is not State.DRAINING
    }
    room_bytes = budget_bytes - _total_bytes(resident)
    coming_bytes = _total_bytes(resident) - _total_bytes(staying)
    actions: list[Action] = [Unload(name) for name in aged]
    for name in _wanted(models, now):
        wanted = models[name]
        if wanted.need_bytes > room_bytes:
            missing_bytes = wanted.need_bytes - room_bytes - coming_bytes
            victims = _victims(_evictable(staying, wanted, now), missing_bytes)
            return actions + [Unload(victim) for victim in victims]
        room_bytes -= wanted.need_bytes
        actions.append(Load(name))
    overdrawn = _victims(_idle(staying), -room_bytes - coming_bytes)
    return actions + [Unload(name) for name in overdrawn]


def next_due(models: Models, now: float) -> float:
    """When there may be something else to decide though nothing happens; infinite if never."""
    times = [_ends_at(model) for model in models.values()]
    times += [model.retry_at for model in models.values() if model.state is State.FAILED]
    times += [
        wanted.waiting_since + patience_seconds(wanted, victim)
        for wanted in models.values()
        if wanted.waiting_since is not None
        for victim in models.values()
    ]
    return min((time for time in times if time > now), default=math.inf)


def can_ever_fit(models: Models, name: str, budget_bytes: int) -> bool:
    """Whether there would be room for the model with nothing else loaded but what never leaves."""
    others = (model for other, model in models.items() if other != name and model.is_pinned)
    return models[name].need_bytes + sum(model.need_bytes for model in others) <= budget_bytes


def fits_now(models: Models, name: str, budget_bytes: int) -> bool:
    """Whether there is room for it beside what is resident; where nothing is, in any case."""
    resident = [model for model in models.values() if model.is_resident]
    taken_bytes = sum(model.need_bytes for model in resident)
    return not resident or taken_bytes + models[name].need_bytes <= budget_bytes


def patience_seconds(wanted: ModelState, victim: ModelState) -> float:
    """How long one waits before another in use has to go: as long as loading both takes, so that
    models in turn cost no more time than they serve.
    """
    return wanted.load_seconds + victim.load_seconds


def _ends_at(model: ModelState) -> float:
    """When its age unloads it."""
    return model.keep_until if model.is_idle and not model.is_pinned else math.inf


def _total_bytes(models: Models) -> int:
    return sum(model.need_bytes for model in models.values())


def _wanted(models: Models, now: float) -> list[str]:
    """Those to be loaded, in the order in which they were asked for."""
    asked = {name: _since(model, now) for name, model in models.items()}
    return sorted(
        (name for name, since in asked.items() if since < math.inf),
        key=lambda name: (asked[name], name),
    )


def _since(model: ModelState, now: float) -> float:
    """Since when it is wanted; infinite where it is not, or may not be loaded now."""
    if model.measuring is not Measuring.DONE:  # nothing shows that it fits into the budget
        return math.inf
    if model.is_resident or (model.state is State.FAILED and model.retry_at > now):
        return math.inf
    if model.waiting_since is not None:
        return model.waiting_since
    is_missed = model.is_pinned and model.state is State.FAILED
    return model.retry_at if is_missed else math.inf


def _victims(candidates: Models, missing_bytes: int) -> Sequence[str]:
    """The fewest that go, in their order, so that so much becomes free; none where all of them are
    not enough.
    """
    if not 0 < missing_bytes <= _total_bytes(candidates):
        return ()
    chosen: list[str] = []
    for name, model in candidates.items():
        if missing_bytes > 0:
            chosen.append(name)
            missing_bytes -= model.need_bytes
    return _without_needless(chosen, candidates, -missing_bytes)


def _evictable(staying: Models, wanted: ModelState, now: float) -> dict[str, ModelState]:
    """The idle ones first. Those in use only when who waits has waited long enough."""
    since = now if wanted.waiting_since is None else wanted.waiting_since
    busy = {
        name: model
        for name, model in staying.items()
        if model.n_users
        and model.state is State.READY
        and not model.is_pinned
        and now >= since + patience_seconds(wanted, model)
    }
    return _idle(staying) | _by_last_use(busy)


def _idle(staying: Models) -> dict[str, ModelState]:
    return _by_last_use(
        {name: model for name, model in staying.items() if model.is_idle and not model.is_pinned}
    )


def _by_last_use(models: Models) -> dict[str, ModelState]:
    """The least recently used first."""
    return dict(sorted(models.items(), key=lambda item: item[1].used_at))


def _without_needless(chosen: Sequence[str], models: Models, spare_bytes: int) -> list[str]:
    """Without those whose memory is not needed beside the others', the latest used first."""
    kept: list[str] = []
    for name in reversed(chosen):
        if models[name].need_bytes <= spare_bytes:
            spare_bytes -= models[name].need_bytes
        else:
            kept.append(name)
    return kept[::-1]
