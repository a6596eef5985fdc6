"""Watches the memory of the machine, and gives memory back while it is short."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from anyio import current_time, sleep_until

from engine.api import EngineStopped
from engine.values.pressure import PressureSource, Reading
from engine.values.stats import EngineStats
from server.activity import RequestTracker, TrackedRequest
from server.admin_schema import MemoryGuardInfo, MemoryReading
from server.errors import memory_short
from server.models.model import LoadedModel
from server.models.registry import ModelRegistry
from server.pressure.policy import NAMES, GuardState, Step, advance, limits_of

INTERVAL_SECONDS = 1.0
"""Between two sets of readings."""

EVICTED_SHARE = 0.25
"""The share of a model's blocks that are evicted at once."""

log = logging.getLogger("rootstock.memory")


class MemoryGuard:
    """Follows the steps of `policy`. Belongs to one event loop; `run` must run."""

    def __init__(
        self, read: Callable[[int], Sequence[Reading]], models: ModelRegistry, short_share: float
    ) -> None:
        """`read` says how short of memory the machine is, and is given the memory of the processes
        of all engines: see `PressureSources.read`. It may take a millisecond. Memory is short once
        `short_share` of it is in use.
        """
        self._read = read
        self._models = models
        self._limits = limits_of(short_share)
        self.state = GuardState()
        self.readings: Sequence[Reading] = ()
        """The latest."""
        self.actions = dict.fromkeys((step for step in Step if step), 0)
        """How often the work of each step was done."""
        self.blocks_evicted = 0

    @property
    def problem(self) -> str:
        """What is done and why, as a clause; empty while memory is not short."""
        state = self.state
        return f"{state.step.words}: {state.cause.words}" if state.cause is not None else ""

    def info(self) -> MemoryGuardInfo:
        """The step and the readings, for the API."""
        return MemoryGuardInfo(
            step=NAMES[self.state.step],
            problem=self.problem or None,
            readings=[
                MemoryReading(
                    source=each.source,
                    share=each.share,
                    limit=self._limits[each.source].short,
                    words=each.words,
                )
                for each in self.readings
            ],
        )

    async def run(self, close: Callable[[str], None], tracker: RequestTracker) -> None:
        """Read and act each INTERVAL_SECONDS until cancelled. `close` stops the admission of
        requests for the reason that it gets, and begins it again with an empty one.
        """
        while True:
            due = current_time() + INTERVAL_SECONDS
            try:
                await self.turn(close, tracker)
            except Exception:
                log.exception("the memory of the machine cannot be watched")
            await sleep_until(due)

    async def turn(self, close: Callable[[str], None], tracker: RequestTracker) -> None:
        """Read once, and do what the readings require."""
        stats = await self._models.stats()
        engines_bytes = sum(each.memory.model.process_bytes for each in stats.values())
        read = await asyncio.to_thread(self._read, engines_bytes)
        self.readings = (*read, *_buffers(stats))
        before, self.state = self.state, advance(self.state, self.readings, self._limits)
        step, cause = self.state.step, self.state.cause
        if step > before.step and cause is not None:
            log.warning("memory is short: %s: %s", cause.words, step.words)
        elif step < before.step:
            log.info("memory is less short: %s no more", before.step.words)
        is_closed = step >= Step.ADMISSION
        close(
            f"This machine is short of memory, so that requests are refused for a while: "
            f"{cause.words}."
            if is_closed and cause is not None
            else ""
        )
        self._models.pool.hold_loads(held=is_closed)
        await self._act(self.state.acts, tracker)

    async def _act(self, acts: Step, tracker: RequestTracker) -> None:
        """Do the work of all steps up to this one."""
        loaded = self._models.all_loaded()
        if acts >= Step.BUFFERS:
            share = EVICTED_SHARE if acts >= Step.PREFIXES else 0.0
            self.actions[Step.BUFFERS] += 1
            self.actions[Step.PREFIXES] += acts >= Step.PREFIXES
            evicted = await asyncio.gather(*(_give_back(one, share) for one in loaded.values()))
            self.blocks_evicted += sum(evicted)
        if acts is Step.ADMISSION:
            self.actions[Step.ADMISSION] += 1
        if acts >= Step.MODELS and (name := self._models.pool.unload_idlest()) is not None:
            self.actions[Step.MODELS] += 1
            log.warning("memory is short: %s is unloaded, which no request uses", name)
        if acts is Step.REQUESTS:
            await self._end_longest(tracker)

    async def _end_longest(self, tracker: RequestTracker) -> None:
        """End the request whose sequences hold most of the KV cache of their model."""
        cause = self.state.cause
        assert cause is not None, "a step is taken for a reason"
        cards = {name: one.engine.card for name, one in self._models.all_loaded().items()}
        blocks = Counter[str]()
        with suppress(EngineStopped):  # whose requests have ended
            for info in await self._models.requests():
                blocks[info.request_id] += info.blocks
        held = {
            one: sum(blocks[each.id] for each in one.requests)
            * cards[one.record.own_model].block_size
            for one in tracker.live
            if one.record.own_model in cards
        }

        def n_bytes(one: TrackedRequest) -> int:
            return held[one] * max(cards[one.record.own_model].kv_bytes_per_token, 1)

        longest = max(held, key=n_bytes, default=None)
        if longest is None or not held[longest]:
            return
        self.actions[Step.REQUESTS] += 1
        log.warning(
            "memory is short: %s: request %s is ended, the longest, with room for %d tokens",
            cause.words,
            longest.record.id,
            held[longest],
        )
        message = (
            "This machine is short of memory, so the request that held most of it was ended, which "
            f"was this one: {cause.words}."
        )
        tracker.end(longest.record.id, memory_short(message))


def _buffers(stats: dict[str, EngineStats]) -> Iterator[Reading]:
    """How near each model's process is to the number of buffers that its device allows."""
    for name, each in stats.items():
        kept, most = each.memory.arrays, each.memory.most_arrays
        if most:
            words = f"{name} keeps {kept:,} of the {most:,} buffers that a process may have"
            yield Reading(PressureSource.BUFFERS, kept / most, words)


async def _give_back(loaded: LoadedModel, share: float) -> int:
    """Have a model give memory back. Returns the number of evicted blocks."""
    try:
        return await loaded.engine.give_back(share)
    except (EngineStopped, TimeoutError) as error:
        log.warning("%s gives no memory back: %s", loaded.model.name, error or "it does not answer")
        return 0
