"""Recounts the stores, and the features of images, while the engine is idle, and logs
contradictions.
"""

import logging
from collections.abc import Callable, Iterator
from itertools import chain

from engine.core.images import ImageFeatures
from engine.core.inbox import Inbox
from kvstore.invariants import recount_idle
from kvstore.store import KVStore
from kvstore.types import Finding

logger = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
"""Idle time before the store is recounted. Most conversations go on sooner."""

MAX_DUTY_CYCLE = 0.1
"""The largest share of the time spent in recounts, if steps interrupt one after another."""

MOST_LOGGED = 20  # problems in one line of the log


class IdleRecount:
    """Recounts the store, that of a draft model, and images' features, once in each pause of the
    engine.

    Every call to the engine interrupts a recount. The recount continues after the call, or restarts
    if the call has changed the store. A reference too many would hold its block until the daemon
    ends; one too few would give a block to two requests.
    """

    def __init__(
        self,
        store: KVStore,
        inbox: Inbox,
        clock: Callable[[], float],
        draft_store: KVStore | None = None,
        images: ImageFeatures | None = None,
    ) -> None:
        self._stores = [store] if draft_store is None else [store, draft_store]
        self._images = images
        self._inbox = inbox
        self._clock = clock
        self._due_seconds: float | None = None  # of the clock; None: not until the store changes
        self._spent_seconds = 0.0  # on the last recount
        self._pieces: Iterator[Finding] = iter(())
        self._version = -1  # of the store, when the recount began
        self._found: list[str] = []
        self._known: set[str] = set()  # problems that were logged

    @property
    def n_problems(self) -> int:
        """The number of different problems found since the start."""
        return len(self._known)

    def changed(self) -> None:
        """Note that the store is being changed, so that a recount starts again."""
        pause_seconds = max(IDLE_SECONDS, self._spent_seconds / MAX_DUTY_CYCLE)
        self._due_seconds = self._clock() + pause_seconds
        self._version = -1

    def rest(self, seconds: float | None) -> None:
        """Recount if it is due, or else sleep until there is a call, for at most `seconds`."""
        if self._due_seconds is None:
            self._inbox.wait(seconds)
        elif (left_seconds := self._due_seconds - self._clock()) > 0:
            self._inbox.wait(left_seconds if seconds is None else min(left_seconds, seconds))
        else:
            self._go_on()

    def _go_on(self) -> None:
        version = sum(store.pool.n_changes for store in self._stores)
        if self._version != version:
            self._version, self._found, self._spent_seconds = version, [], 0.0
            images = () if self._images is None else self._images.problems()
            self._pieces = chain(*map(recount_idle, self._stores), images)
        began = self._clock()
        try:
            while not self._inbox.n_calls:
                if (found := next(self._pieces)) is not None:
                    self._found.append(found)
        except StopIteration:
            self._end()
        except Exception as error:  # the daemon goes on, whatever is wrong with the store
            logger.exception("the recount of the KV store failed")
            self._found.append(f"it cannot be recounted: {type(error).__name__}")
            self._end()
        self._spent_seconds += self._clock() - began

    def _end(self) -> None:
        self._due_seconds, self._version = None, -1
        new = [problem for problem in self._found if problem not in self._known]
        self._known.update(new)
        if new:
            problems = "; ".join(new[:MOST_LOGGED])
            logger.error("the KV store contradicts itself in %d places: %s", len(new), problems)
