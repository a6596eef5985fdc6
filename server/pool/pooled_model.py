"""One model of the pool: its state, who waits for it, and its stay in memory."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from anyio import Event

from server.pool.errors import LoadFailed
from server.pool.states import Measuring, ModelState, State

FIRST_BACKOFF_SECONDS = 1.0
MOST_BACKOFF_SECONDS = 60.0
"""Before a model that has failed is loaded again: doubled each time, until it has served."""


class Resident(Protocol):
    """A model that is loaded."""

    async def ended(self) -> str:
        """How it ended. Returns when it serves no more, whether or not it was asked to end."""
        ...

    async def drain(self, timeout_seconds: float) -> None:
        """Let requests end, and give back its memory. Raises nothing."""
        ...


ResidentT = TypeVar("ResidentT", bound=Resident)


@dataclass(slots=True, eq=False)
class Stay(Generic[ResidentT]):
    """One stay of a model in memory. Who has got hold of it lets go of this one, and no later."""

    model: ResidentT
    uses: set["Use[ResidentT]"] = field(default_factory=set)
    kept_until: dict[str, float] = field(default_factory=dict)
    """For each API key, the latest end of what its ended uses wished: use time plus wish."""
    has_served: bool = False  # a request, to its end
    has_ended: bool = False

    @property
    def keep_until(self) -> float:
        """When the last wish ends."""
        return max(self.kept_until.values(), default=-math.inf)

    def keep(self, key: str, until: float) -> None:
        """Add a wish. It shortens no earlier one."""
        self.kept_until[key] = max(self.kept_until.get(key, -math.inf), until)


@dataclass(slots=True)
class Wish:
    """How many seconds a request wishes the model to stay loaded after the request has ended.

    `key` names the API key of the request, and is empty without keys.
    """

    key: str
    seconds: float


@dataclass(slots=True, eq=False)
class Use(Generic[ResidentT]):
    """One request's hold on a residency of a model."""

    stay: Stay[ResidentT]
    wish: Wish


@dataclass(slots=True, eq=False)
class Waiter(Generic[ResidentT]):
    """A request that waits for a model, and the answer."""

    wish: Wish
    answered: Event = field(default_factory=Event)
    use: Use[ResidentT] | None = None
    error: Exception | None = None


class PooledModel(Generic[ResidentT]):
    """Kept by the pool. Times are of the pool's clock."""

    def __init__(
        self,
        start: Callable[[int], Awaitable[ResidentT]],
        measure: Callable[[], Awaitable[int]],
        ttl_seconds: float | None = None,
        is_pinned: bool = False,
    ) -> None:
        """`measure` says how many bytes it needs, before anything is loaded; `start` loads it
        within them. Both raise what there is to say. `ttl_seconds` is the wish of each request that
        states none; None is one without an end.
        """
        self.start = start
        self.measure = measure
        self.ttl_seconds = ttl_seconds
        self.state = ModelState(0, is_pinned=is_pinned, measuring=Measuring.NOT_YET)
        self.stay: Stay[ResidentT] | None = None
        self.waiters: list[Waiter[ResidentT]] = []
        self.failure = ""  # the reason of the last one; "" when it was loaded or unloaded since
        self.changed = Event()
        self._n_failures = 0  # in a row

    @property
    def resident(self) -> ResidentT | None:
        """The model, while it may be used."""
        return self.stay.model if self.stay is not None else None

    @property
    def is_coming(self) -> bool:
        """Whether it is on its way into memory: what it needs is found out, or it is loaded."""
        return self.state.measuring is Measuring.RUNS or self.state.state is State.LOADING

    def set(self, **changes: object) -> None:
        """Replace fields of the state, and wake who waits for a change."""
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]
        changed, self.changed = self.changed, Event()
        changed.set()

    def wish(self, key: str, seconds: float | None) -> Wish:
        """The wish of a request; `ttl_seconds` where the request states none."""
        if seconds is None:
            seconds = self.ttl_seconds
        return Wish(key, math.inf if seconds is None else seconds)

    def hold(self, stay: Stay[ResidentT], wish: Wish, now: float) -> Use[ResidentT]:
        use = Use(stay, wish)
        stay.uses.add(use)
        self._note_use(stay, now)
        return use

    def let_go(self, use: Use[ResidentT], now: float) -> None:
        stay = use.stay
        stay.has_served = True
        stay.uses.remove(use)
        stay.keep(use.wish.key, now + use.wish.seconds)
        self._note_use(stay, now)

    def withdraw(self, key: str) -> None:
        """Drop the wishes of an API key: of its ended, its running and its waiting requests."""
        wishes = [waiter.wish for waiter in self.waiters]
        if self.stay is not None:
            self.stay.kept_until.pop(key, None)
            wishes += [use.wish for use in self.stay.uses]
            self.set(keep_until=self.stay.keep_until)
        for wish in wishes:
            if wish.key == key:
                wish.seconds = 0.0

    def seconds_left(self, now: float) -> float:
        """Until its age unloads it if no other request uses it; infinite: never."""
        if self.stay is None or self.state.is_pinned:
            return math.inf
        running = (use.wish.seconds for use in self.stay.uses)
        return max(self.stay.keep_until - now, *running, 0.0)

    def give_up(self, waiter: Waiter[ResidentT], now: float) -> None:
        """It waits no more, perhaps just when it was answered."""
        if waiter.use is not None:
            self.let_go(waiter.use, now)
        elif waiter in self.waiters:
            self.waiters.remove(waiter)
            if not self.waiters:
                self.set(waiting_since=None)

    def loaded(self, resident: ResidentT, load_seconds: float, now: float) -> Stay[ResidentT]:
        """Whoever waits has it at once: a model that nobody has may be unloaded again.

        Where no request waits any more, the load itself counts as a use without a stated wish.
        """
        self.stay = Stay(resident)
        self.failure = ""
        waiters, self.waiters = self.waiters, []
        if not waiters:
            wish = self.wish("", None)
            self.stay.keep(wish.key, now + wish.seconds)
        self.set(
            state=State.READY,
            waiting_since=None,
            n_users=0,
            used_at=now,
            keep_until=self.stay.keep_until,
            load_seconds=load_seconds,
        )
        for waiter in waiters:
            waiter.use = self.hold(self.stay, waiter.wish, now)
            waiter.answered.set()
        return self.stay

    def unloaded(self) -> None:
        self.stay, self.failure = None, ""
        self._n_failures = 0
        self.set(state=State.UNLOADED, n_users=0)

    def fail(self, reason: str, now: float) -> None:
        """It cannot be loaded, or has died. One that has served is loaded again when asked for."""
        has_served = self.stay is not None and self.stay.has_served
        self._n_failures = 0 if has_served else self._n_failures + 1
        backoff_seconds = _backoff_seconds(self._n_failures)
        self.failure, self.stay = reason, None
        self.set(state=State.FAILED, n_users=0, retry_at=now + backoff_seconds)
        self.refuse_waiters(LoadFailed(reason, backoff_seconds))

    def refuse_waiters(self, error: Exception) -> None:
        waiters, self.waiters = self.waiters, []
        self.set(waiting_since=None)
        for waiter in waiters:
            waiter.error = error
            waiter.answered.set()

    def _note_use(self, stay: Stay[ResidentT], now: float) -> None:
        if self.stay is stay:
            self.set(n_users=len(stay.uses), used_at=now, keep_until=stay.keep_until)


def _backoff_seconds(n_failures: int) -> float:
    if not n_failures:
        return 0.0
    return min(FIRST_BACKOFF_SECONDS * 2.0 ** min(n_failures - 1, 16), MOST_BACKOFF_SECONDS)
