"""Loads and unloads models as `decide` says, and lets requests wait for theirs."""

import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Generic

from anyio import (
    TASK_STATUS_IGNORED,
    Event,
    create_task_group,
    current_time,
    fail_after,
    move_on_after,
)
from anyio.abc import TaskGroup, TaskStatus

from server.pool.decide import Load, Unload, can_ever_fit, decide, fits_now, next_due
from server.pool.errors import LoadFailed, NeverFits, PoolClosed, WaitedTooLong
from server.pool.pooled_model import (
    PooledModel,
    ResidentT,
    Stay,
    Use,
    Waiter,
    Wish,
)
from server.pool.states import Measuring, ModelState, State

ABORT_SECONDS = 5.0
"""For an engine that nobody uses any more to end what its clients have left behind."""

log = logging.getLogger("rootstock.pool")


class ModelPool(Generic[ResidentT]):
    """The models by name. Belongs to one event loop; `run` must run."""

    def __init__(
        self,
        models: Mapping[str, PooledModel[ResidentT]],
        budget_bytes: int,
        load_timeout_seconds: float,
        clock: Callable[[], float] = current_time,
    ) -> None:
        self.models = dict(models)
        self.budget_bytes = budget_bytes
        self._load_timeout_seconds = load_timeout_seconds
        self._clock = clock
        self._wake = Event()
        self._is_closed = False
        self._tasks: TaskGroup

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        async with create_task_group() as self._tasks:
            task_status.started()
            while True:
                self._wake = Event()
                self.turn()
                now = self._clock()
                due = next_due(self.states(), now)
                with move_on_after(None if due == math.inf else due - now):
                    await self._wake.wait()

    def turn(self) -> None:
        """Decide, and begin what is decided."""
        if self._is_closed:
            return
        now = self._clock()
        for action in decide(self.states(), self.budget_bytes, now):
            match action:
                case Load(name):
                    self.models[name].set(state=State.LOADING, began_at=now)
                    self._tasks.start_soon(self._load, name)
                case Unload(name):
                    self._begin_unload(name)

    def states(self) -> dict[str, ModelState]:
        return {name: model.state for name, model in self.models.items()}

    @asynccontextmanager
    async def using(
        self, name: str, key: str = "", keep_seconds: float | None = None
    ) -> AsyncIterator[ResidentT]:
        """The model, loaded if it is not, and not unloaded while the block runs.

        After the block it stays loaded for `keep_seconds`, or the model's `ttl_seconds` where that
        is None, or longer if another use in this residency wishes so. `key` names the API key.

        Raises NeverFits, LoadFailed, WaitedTooLong or PoolClosed.
        """
        model = self.models[name]
        use = await self._hold(name, model, model.wish(key, keep_seconds))
        try:
            yield use.stay.model
        finally:
            model.let_go(use, self._clock())
            if not use.stay.uses:
                self._wake.set()

    async def preload(self, name: str) -> None:
        """Load it, if it needs no others to go: else the log says that it has been left out. The
        first is loaded in any case, or raises why not.

        Raises NeverFits, LoadFailed, WaitedTooLong or PoolClosed.
        """
        model = self.models[name]
        self._begin_measuring(name, model)
        while model.state.measuring is Measuring.RUNS:
            await model.changed.wait()
        if fits_now(self.states(), name, self.budget_bytes):
            async with self.using(name):
                pass
        else:
            log.warning(
                "%s is not loaded at start: it needs %.1f GiB, more than the others leave of the "
                "%.1f GiB of memory_budget; it is loaded when a request names it",
                name,
                model.state.need_bytes / 2**30,
                self.budget_bytes / 2**30,
            )

    async def unload(self, name: str) -> None:
        """Returns when it is gone, and what it had accepted has ended. Forgets that it failed."""
        model = self.models[name]
        while model.state.state is State.LOADING:
            await model.changed.wait()
        if model.state.state is State.READY:
            self._begin_unload(name)
        while model.state.state is State.DRAINING:
            await model.changed.wait()
        if model.state.state is State.FAILED:
            model.unloaded()

    def begin_unload(self, name: str) -> None:
        """Unload the model as `unload` does, without waiting for the end."""
        self._tasks.start_soon(self.unload, name)

    def withdraw(self, name: str, key: str) -> None:
        """Drop every wish of an API key to keep the model loaded. Other keys' wishes hold it."""
        self.models[name].withdraw(key)
        self._wake.set()

    def seconds_left(self, name: str) -> float:
        """Until its age unloads a loaded model that no other request uses; infinite: never."""
        return self.models[name].seconds_left(self._clock())

    def correct(self, name: str, need_bytes: int) -> None:
        """What a loaded model takes is another figure than was computed."""
        model = self.models[name]
        if model.state.is_resident and model.state.need_bytes != need_bytes:
            model.set(need_bytes=need_bytes)
            self._wake.set()

    async def drain(self, timeout_seconds: float) -> None:
        """Load nothing any more, and end all that is loaded when its requests have ended."""
        self._is_closed = True
        for model in self.models.values():
            model.refuse_waiters(PoolClosed())
        async with create_task_group() as tasks:
            for model in self.models.values():
                if model.resident is not None:
                    tasks.start_soon(model.resident.drain, timeout_seconds)

    async def _hold(self, name: str, model: PooledModel[ResidentT], wish: Wish) -> Use[ResidentT]:
        if self._is_closed:
            raise PoolClosed
        if model.state.state is State.READY and model.stay is not None:
            return model.hold(model.stay, wish, self._clock())
        wait_seconds = model.state.retry_at - self._clock()
        if model.state.state is State.FAILED and wait_seconds > 0:
            raise LoadFailed(model.failure, wait_seconds)
        return await self._wait(name, model, wish)

    async def _wait(self, name: str, model: PooledModel[ResidentT], wish: Wish) -> Use[ResidentT]:
        waiter: Waiter[ResidentT] = Waiter(wish)
        model.waiters.append(waiter)
        self._ask_for(name, model)
        try:
            with fail_after(self._load_timeout_seconds):
                await waiter.answered.wait()
            if waiter.error is not None:
                raise waiter.error
            assert waiter.use is not None, "an answer is an error or a model"
            return waiter.use
        except BaseException as error:
            model.give_up(waiter, self._clock())
            self._wake.set()
            if isinstance(error, TimeoutError):
                raise WaitedTooLong(self._load_timeout_seconds) from None
            raise

    def _ask_for(self, name: str, model: PooledModel[ResidentT]) -> None:
        """Somebody waits for the model. What it needs is known before it has a place in line."""
        self._begin_measuring(name, model)
        match model.state.measuring:
            case Measuring.DONE if not can_ever_fit(self.states(), name, self.budget_bytes):
                model.refuse_waiters(NeverFits(model.state.need_bytes, self.budget_bytes))
            case Measuring.DONE if model.state.waiting_since is None:
                model.set(waiting_since=self._clock())
                self._wake.set()

    def _begin_measuring(self, name: str, model: PooledModel[ResidentT]) -> None:
        if model.state.measuring is Measuring.NOT_YET:
            model.set(measuring=Measuring.RUNS)
            self._tasks.start_soon(self._measure, name)

    async def _measure(self, name: str) -> None:
        model = self.models[name]
        try:
            need_bytes = await model.measure()
        except Exception as error:
            reason = (
                f"how much memory it needs is unknown, so nothing shows that it fits into "
                f"memory_budget: {error}"
            )
            log.error("cannot load %s: %s", name, reason)
            model.set(measuring=Measuring.NOT_YET)
            model.fail(reason, self._clock())
        else:
            model.set(need_bytes=need_bytes, measuring=Measuring.DONE)
            if model.waiters:
                self._ask_for(name, model)

    async def _load(self, name: str) -> None:
        model, began = self.models[name], self._clock()
        try:
            resident = await model.start(model.state.need_bytes)
        except Exception as error:
            log.error("cannot load %s: %s", name, error)
            log.debug("the whole story", exc_info=True)
            model.fail(str(error), self._clock())
        else:
            now = self._clock()
            stay = model.loaded(resident, now - began, now)
            self._tasks.start_soon(self._follow, name, stay)
        self._wake.set()

    async def _follow(self, name: str, stay: Stay[ResidentT]) -> None:
        """See that its end is noted, also when nobody has asked for it."""
        model = self.models[name]
        how = await stay.model.ended()
        stay.has_ended = True
        if model.stay is stay and model.state.state is State.READY and not self._is_closed:
            log.error("%s has ended: %s", name, how)
            model.fail(how, self._clock())
            self._wake.set()
            await stay.model.drain(ABORT_SECONDS)
        else:
            model.set()  # its unloading need not wait for what has ended with it

    def _begin_unload(self, name: str) -> None:
        self.models[name].set(state=State.DRAINING)
        self._tasks.start_soon(self._unload, name)

    async def _unload(self, name: str) -> None:
        model = self.models[name]
        stay = model.stay
        assert stay is not None, "what is unloaded was ready"
        while stay.uses and not stay.has_ended:
            await model.changed.wait()
        await stay.model.drain(ABORT_SECONDS)
        model.unloaded()
        log.info("%s is unloaded", name)
        self._wake.set()
