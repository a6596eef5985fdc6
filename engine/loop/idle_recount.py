"""Recounts the store while the engine has nothing to do, and says what does not add up."""

import logging

from engine.loop.inbox import Inbox
from kvstore.invariants import recount
from kvstore.store import KVStore

logger = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
"""Idle for so long before the store is recounted: not between two requests of a conversation."""


class IdleRecount:
    """One recount for each time in which nothing is computed. A call to the engine ends it at once.

    A reference that is lost would hold its block until the daemon ends, and one too few would give
    a block to two. Neither has a cause that is known; that is why somebody looks.
    """

    def __init__(self, store: KVStore, inbox: Inbox) -> None:
        self._store = store
        self._inbox = inbox
        self._is_due = False
        self.n_problems = 0  # found since start

    def stepped(self) -> None:
        """A step was computed: what has been counted says nothing any more."""
        self._is_due = True

    def rest(self, seconds: float | None) -> None:
        """Sleep until there is a call to the engine, for at most so long, and recount meanwhile."""
        if not self._is_due or (seconds is not None and seconds < IDLE_SECONDS):
            self._inbox.wait(seconds)
            return
        self._inbox.wait(IDLE_SECONDS)
        problems = list[str]()
        for found in recount(self._store):
            if self._inbox.has_calls:
                return
            if found is not None:
                problems.append(found)
        self._is_due = False
        self.n_problems += len(problems)
        if problems:
            logger.error("the KV store contradicts itself: %s", "; ".join(problems))
