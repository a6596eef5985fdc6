"""How far texts begin like others, which is what of them is worth a place in the cache."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

Tokens = tuple[int, ...]

REMEMBERED = 32
MOST_TOKENS = 4096


class Beginnings:
    """Remembers the beginnings of the last requests' first texts, by their salt: clients write the
    same instruction before every text, one request at a time. Safe in several threads.
    """

    def __init__(self) -> None:
        self._latest = deque[tuple[str, Tokens]](maxlen=REMEMBERED)

    def shared_tokens(self, salt: str, texts: Sequence[Tokens]) -> list[int]:
        """Of each text, how many of its first tokens another begins with, of these or of the
        latest.
        """
        known = [tokens for other, tokens in tuple(self._latest) if other == salt]
        found = _shared([*texts, *known])[: len(texts)]
        self._latest.append((salt, texts[0][:MOST_TOKENS]))
        return found


def _shared(texts: Sequence[Tokens]) -> list[int]:
    """What each has most of in common is beside it, once they are sorted."""
    found = [0] * len(texts)
    order = sorted(range(len(texts)), key=texts.__getitem__)
    for before, after in pairwise(order):
        common = _common(texts[before], texts[after])
        found[before] = max(found[before], common)
        found[after] = max(found[after], common)
    return found


def _common(left: Tokens, right: Tokens) -> int:
    """By halves, each compared at once."""
    longest = min(len(left), len(right))
    lengths = range(1, longest + 1)
    return bisect_left(lengths, True, key=lambda n: left[:n] != right[:n])
