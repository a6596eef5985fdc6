"""Loads and unloads models as the policy says, and lets requests wait for theirs."""

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from anyio import (
    TASK_STATUS_IGNORED,
    Event,
    create_task_group,
    current_time,
    fail_after,
    move_on_after,
)
from anyio.abc import TaskGroup, TaskStatus

from engine.api import ModelError
from engine.values.stats import readable_bytes
from server.models.model import Lease, LoadedModel, Model
from server.models.policy import (
    Draining,
    Failed,
    Load,
    Loading,
    Measuring,
    ModelState,
    Need,
    Ready,
    Resident,
    Unload,
    can_ever_fit,
    decide,
    fits_now,
    idlest,
    need_of,
    next_due,
)

ABORT_SECONDS = 5.0
"""Time for an engine without leases to finish the requests of clients that have left."""

log = logging.getLogger("rootstock.pool")


class PoolError(Exception):
    """Why a request does not get its model."""


class NeverFits(PoolError):
    """The model needs more memory than there would be with nothing else loaded."""

    def __init__(self, model: Model, need_bytes: int, budget_bytes: int) -> None:
        parts = f" ({model.planned.words})" if model.planned is not None else ""
        super().__init__(
            f"it needs {readable_bytes(need_bytes)} of memory{parts}, and all models together may "
            f"take {readable_bytes(budget_bytes)} (memory_budget), those that are pinned included"
        )


class LoadFailed(PoolError):
    """Loading has failed. A request after `retry_after_seconds` tries again."""

    def __init__(self, reason: str, retry_after_seconds: float) -> None:
        super().__init__(reason)
        self.retry_after_seconds = retry_after_seconds


class WaitedTooLong(PoolError):
    """The model was not ready in time."""

    def __init__(self, waited_seconds: float) -> None:
        super().__init__(f"it was not ready within {waited_seconds:g} s (load_timeout_seconds)")


class PoolClosed(PoolError):
    """The server stops."""

    def __init__(self) -> None:
        super().__init__("the server is stopping")


class ModelPool:
    """The models by their own names. Belongs to one event loop; `run` must run."""

    def __init__(
        self,
        measure: Callable[[Model], Awaitable[int]],
        load: Callable[[Model, int], Awaitable[LoadedModel]],
        budget_bytes: int,
        load_timeout_seconds: float,
        clock: Callable[[], float] = current_time,
    ) -> None:
        """`measure` finds how many bytes of memory a model needs, and `load` loads it within as
        many. Both may raise any exception, whose text is the reason for clients.
        """
        self.models: dict[str, Model] = {}
        self.budget_bytes = budget_bytes
        self._measure_model = measure
        self._load_model = load
        self._load_timeout_seconds = load_timeout_seconds
        self._clock = clock
        self._wake = Event()
        self._is_closed = False
        self._holds_loads = False
        self._tasks: TaskGroup

    def add(self, model: Model) -> None:
        """Register a model, which must have a name of its own."""
        self.models[model.name] = model

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Load and unload models until cancelled."""
        async with create_task_group() as self._tasks:
            task_status.started()
            while True:
                self._wake = Event()
                self.turn()
                now = self._clock()
                due = next_due(self._states(), now)
                with move_on_after(None if due == math.inf else due - now):
                    await self._wake.wait()

    def turn(self) -> None:
        """Start the actions that the policy decides."""
        if self._is_closed:
            return
        now = self._clock()
        for action in decide(self._states(), self.budget_bytes, now):
            model = self.models[action.name]
            match action:
                case Load() if self._holds_loads:
                    continue
                case Load(need=need):
                    model.become(Loading(need, now, model.failure))
                    self._tasks.start_soon(self._load, model, need)
                case Unload():
                    self._begin_unload(model)

    def hold_loads(self, *, held: bool) -> None:
        """Load nothing while memory is short: requests wait for their models until it is not, or
        until `load_timeout_seconds` have passed.
        """
        if held is not self._holds_loads:
            self._holds_loads = held
            self._wake.set()

    def unload_idlest(self) -> str | None:
        """Unload the least recently used of the models that no request uses and that are not
        pinned. Returns its name; None: there is none.
        """
        if (name := idlest(self._states())) is not None:
            self._begin_unload(self.models[name])
        return name

    def _states(self) -> dict[str, ModelState]:
        return {name: model.state for name, model in self.models.items()}

    @asynccontextmanager
    async def using(
        self, model: Model, key: str = "", keep_seconds: float | None = None
    ) -> AsyncIterator[LoadedModel]:
        """The model, loaded if it is not, and not unloaded while the block runs.

        After the block it stays loaded for `keep_seconds`, or the model's `ttl_seconds` if that is
        None, or longer if another lease of the same stay in memory wishes so. `key` names the API
        key.

        Raises NeverFits, LoadFailed, WaitedTooLong or PoolClosed.
        """
        lease = model.lease(key, keep_seconds)
        loaded = await self._acquire(model, lease)
        try:
            yield loaded
        finally:
            model.release(lease, self._clock())
            if not loaded.leases:
                self._wake.set()

    async def preload(self, model: Model) -> None:
        """Load the model if no other has to go for it; else log that it is not loaded. The first
        model is loaded in any case.

        Raises NeverFits, LoadFailed, WaitedTooLong or PoolClosed.
        """
        self._begin_measuring(model)
        while isinstance(model.state, Measuring):
            await model.changed.wait()
        need = need_of(model.state)
        if need is None or fits_now(self._states(), need, self.budget_bytes):
            async with self.using(model):
                pass
        else:
            log.warning(
                "%s is not loaded at start: it needs %s, more than the others leave of the %s of "
                "memory_budget; it is loaded when a request names it",
                model.name,
                readable_bytes(need.bytes),
                readable_bytes(self.budget_bytes),
            )

    async def unload(self, model: Model) -> None:
        """Unload the model when its leases have ended, and return then. Forgets a failure."""
        while isinstance(model.state, Loading):
            await model.changed.wait()
        self._begin_unload(model)
        while isinstance(model.state, Draining):
            await model.changed.wait()
        if model.failure is not None:
            model.forget_failure()

    def begin_unload(self, model: Model) -> None:
        """Unload the model as `unload` does, without waiting for the end."""
        self._tasks.start_soon(self.unload, model)

    def withdraw(self, model: Model, key: str) -> None:
        """Drop every wish of an API key to keep the model loaded. Other keys' wishes hold it."""
        model.withdraw(key)
        self._wake.set()

    def correct(self, model: Model, need_bytes: int) -> None:
        """A resident model takes another number of bytes than was computed."""
        if isinstance(model.state, Resident) and model.state.need.bytes != need_bytes:
            model.become(replace(model.state, need=replace(model.state.need, bytes=need_bytes)))
            self._wake.set()

    async def drain(self, timeout_seconds: float) -> None:
        """Load no more models, and end all that are loaded when their requests have ended."""
        self._is_closed = True
        for model in self.models.values():
            model.refuse(PoolClosed())
        async with create_task_group() as tasks:
            for model in self.models.values():
                if model.loaded is not None:
                    tasks.start_soon(model.loaded.drain, timeout_seconds)

    async def _acquire(self, model: Model, lease: Lease) -> LoadedModel:
        if self._is_closed:
            raise PoolClosed
        now = self._clock()
        match model.state:
            case Ready() if model.loaded is not None:
                model.hold(lease, model.loaded, now)
                return model.loaded
            case Failed(reason=reason, retry_at=retry_at) if now < retry_at:
                raise LoadFailed(reason, retry_at - now)
        model.waiting.append(lease)
        self._queue(model)
        try:
            with fail_after(self._load_timeout_seconds):
                await lease.answered.wait()
            if lease.error is not None:
                raise lease.error
            assert lease.loaded is not None, "an answer is an error or a model"
            return lease.loaded
        except BaseException as error:
            model.release(lease, self._clock())
            self._wake.set()
            if isinstance(error, TimeoutError):
                raise WaitedTooLong(self._load_timeout_seconds) from None
            raise

    def _queue(self, model: Model) -> None:
        """Queue the model for loading, if it can fit. Its need is measured before it is queued."""
        need = need_of(model.state)
        if need is None:
            self._begin_measuring(model)
        elif can_ever_fit(self._states(), model.name, need, self.budget_bytes):
            model.queue(self._clock())
            self._wake.set()
        else:
            model.refuse(NeverFits(model, need.bytes, self.budget_bytes))

    def _begin_measuring(self, model: Model) -> None:
        if model.begin_measuring():
            self._tasks.start_soon(self._measure, model)

    async def _measure(self, model: Model) -> None:
        try:
            need_bytes = await self._measure_model(model)
        except ModelError as error:  # about the model itself
            log.error("cannot load %s: %s", model.name, error)
            self._fail(model, str(error))
        except Exception as error:
            reason = (
                f"how much memory it needs is unknown, so nothing shows that it fits into "
                f"memory_budget: {error}"
            )
            log.error("cannot load %s: %s", model.name, reason)
            self._fail(model, reason)
        else:
            model.measured(need_bytes)
            if model.waiting:
                self._queue(model)

    async def _load(self, model: Model, need: Need) -> None:
        try:
            loaded = await self._load_model(model, need.bytes)
        except Exception as error:
            log.error("cannot load %s: %s", model.name, error)
            log.debug("the whole story", exc_info=True)
            self._fail(model, str(error))
        else:
            model.enter(loaded, self._clock())
            self._tasks.start_soon(self._follow, model, loaded)
        self._wake.set()

    async def _follow(self, model: Model, loaded: LoadedModel) -> None:
        """Note the end of the engine, also while no request uses it."""
        how = await loaded.engine.ended()
        loaded.has_ended = True
        if model.loaded is loaded and isinstance(model.state, Ready) and not self._is_closed:
            log.error("%s has ended: %s", model.name, how)
            self._fail(model, how)
            self._wake.set()
            await loaded.drain(ABORT_SECONDS)
        else:
            model.notify()  # unloading need not wait for leases that have ended with the engine

    def _fail(self, model: Model, reason: str) -> None:
        backoff_seconds = model.fail(reason, self._clock())
        model.refuse(LoadFailed(reason, backoff_seconds))

    def _begin_unload(self, model: Model) -> None:
        """Let the model drain if it is ready."""
        if isinstance(model.state, Ready) and model.loaded is not None:
            model.become(Draining(model.state.need))
            self._tasks.start_soon(self._unload, model, model.loaded)

    async def _unload(self, model: Model, loaded: LoadedModel) -> None:
        while loaded.leases and not loaded.has_ended:
            await model.changed.wait()
        await loaded.drain(ABORT_SECONDS)
        model.leave()
        log.info("%s is unloaded", model.name)
        self._wake.set()
