"""Which waiting sequences had better wait for what a running one is computing right now."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from engine.sequence import LiveSequence, Status, held_lease
from kvstore.lease import Lease
from kvstore.tokens import common_tokens


class Sharing(Protocol):
    def joined(self, sequence: LiveSequence, waiting: Iterable[LiveSequence]) -> None:
        """The sequence runs from now on; `waiting` are those that may want to share with it."""
        ...

    def left(self, sequence: LiveSequence) -> None:
        """It runs no more."""
        ...

    def must_wait(self, sequence: LiveSequence) -> bool:
        """Whether a running sequence is about to publish blocks that this one would compute."""
        ...

    def forget(self, sequence: LiveSequence) -> None:
        """The sequence waits no more."""
        ...


@dataclass(slots=True)
class _Wait:
    """`sequence` waits until `leader` has computed `until_tokens`.

    Leaders up to the `compared`-th have been compared with it.
    """

    leader: LiveSequence | None = None
    until_tokens: int = 0
    compared: int = 0


class WaitForTwins:
    """A prompt whose next whole blocks are being computed waits for them.

    Each waiting sequence is compared with each running one at most once. `checkpoint` is told which
    lease somebody waits for, and behind how many of its tokens they will want to go on.
    """

    def __init__(self, block_size: int, checkpoint: Callable[[Lease, int], None]) -> None:
        self._block_size = block_size
        self._checkpoint = checkpoint
        self._leaders: dict[LiveSequence, int] = {}  # running, with the order in which they joined
        self._joined = 0
        self._waits: dict[LiveSequence, _Wait] = {}

    def joined(self, sequence: LiveSequence, waiting: Iterable[LiveSequence]) -> None:
        self._joined += 1
        self._leaders[sequence] = self._joined
        for other in waiting:  # now, before a step runs past where they will go on
            self.must_wait(other)

    def left(self, sequence: LiveSequence) -> None:
        self._leaders.pop(sequence, None)

    def must_wait(self, sequence: LiveSequence) -> bool:
        wait = self._waits.setdefault(sequence, _Wait())
        if self._is_computing(wait):
            return True
        for leader, order in reversed(self._leaders.items()):
            if order <= wait.compared:
                break
            shared_tokens = self._shared_tokens(leader, sequence)
            if shared_tokens > leader.computed_tokens and shared_tokens > wait.until_tokens:
                wait.leader, wait.until_tokens = leader, shared_tokens
        wait.compared = self._joined
        if wait.leader is not None:
            self._checkpoint(held_lease(wait.leader), wait.until_tokens)
        return self._is_computing(wait)

    def forget(self, sequence: LiveSequence) -> None:
        self._waits.pop(sequence, None)

    def _is_computing(self, wait: _Wait) -> bool:
        leader = wait.leader
        if leader is None:
            return False
        if leader.status is Status.RUNNING and leader.computed_tokens < wait.until_tokens:
            return True
        wait.leader, wait.until_tokens = None, 0
        return False

    def _shared_tokens(self, leader: LiveSequence, follower: LiveSequence) -> int:
        """Tokens in the whole blocks that both begin with, less the follower's last token."""
        if leader.namespace != follower.namespace:
            return 0
        end = min(len(leader.tokens), len(follower.tokens) - 1)
        shared = common_tokens(leader.tokens.packed(0, end), follower.tokens.packed(0, end))
        return shared - shared % self._block_size


class NoSharing:
    """Nobody waits for anybody: there is no index to find the blocks in."""

    def joined(self, sequence: LiveSequence, waiting: Iterable[LiveSequence]) -> None:
        """Nothing to note."""

    def left(self, sequence: LiveSequence) -> None:
        """Nothing to note."""

    def must_wait(self, sequence: LiveSequence) -> bool:
        return False

    def forget(self, sequence: LiveSequence) -> None:
        """Nothing to forget."""
