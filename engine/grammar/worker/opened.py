"""The matchers that a grammar process keeps."""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from llguidance import LLMatcher

from engine.grammar.worker.grammar import first_line

MOST_FORCED = 32
"""Tokens that are told beside a mask: more are never verified in one step."""


class Unfollowable(Exception):
    """The grammar cannot be followed any further. Why, for the client."""


class OpenMatcher:
    """A matcher, how many tokens it has been given, and the next ones, where there is no choice.

    To find forced tokens out takes as long as their whole run; so that is done once for each run.
    """

    def __init__(self, matcher: LLMatcher, mask_bytes: int) -> None:
        self.n_tokens = 0
        self._matcher = matcher
        self._mask_bytes = mask_bytes
        self._forced = deque[int]()

    def accept(self, token: int) -> None:
        """Errors show in what may follow."""
        self._matcher.consume_token(token)
        self.n_tokens += 1
        if self._forced and self._forced[0] == token:
            self._forced.popleft()
        else:
            self._forced.clear()

    @property
    def is_complete(self) -> bool:
        return _is_complete(self._matcher)

    def mask(self) -> bytes:
        """The tokens that may follow; see `wire.Mask`. Raises Unfollowable."""
        return _mask(self._matcher, self._mask_bytes)

    def forced(self) -> tuple[int, ...]:
        """The first of the tokens that must follow; none where there is a choice."""
        if not self._forced:
            self._forced.extend(self._matcher.compute_ff_tokens())
        return tuple(islice(self._forced, MOST_FORCED))

    def ahead(self, tokens: Iterable[int], is_over: Callable[[], bool]) -> tuple[list[bytes], bool]:
        """The masks behind the first of some more tokens, behind the second, and so on, and whether
        the grammar is complete behind the last of them that it follows.

        There are fewer masks where it refuses a token, and from where `is_over`. The matcher does
        not change: a copy is walked, which takes microseconds and has the limits of its own.
        """
        walker, masks = self._matcher.deep_copy(), list[bytes]()
        for token in tokens:
            if is_over() or not walker.consume_token(token):
                break
            if _is_complete(walker):
                return masks, True
            try:
                masks.append(_mask(walker, self._mask_bytes))
            except Unfollowable:
                break
        return masks, False


def _is_complete(matcher: LLMatcher) -> bool:
    return matcher.is_stopped() and not matcher.is_error()  # an error stops it, too


def _mask(matcher: LLMatcher, mask_bytes: int) -> bytes:
    """Raises Unfollowable."""
    bits = matcher.compute_bitmask()[:mask_bytes]  # it has a word more
    if matcher.is_error() or not any(bits):
        why = first_line(matcher.get_error() or "it allows no token")
        raise Unfollowable(f"it cannot be followed: {why}")
    return bits
