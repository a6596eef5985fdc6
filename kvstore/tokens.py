"""The tokens of one sequence, packed so that runs of them compare at the speed of memcmp."""

from array import array
from collections.abc import Iterable

TOKEN_BYTES = array("I").itemsize
"""Bytes of one packed token id (an unsigned 32-bit integer in machine order)."""


class Tokens:
    """An append-only list of token ids.

    The sequence that owns it appends; its lease and the radix tree only read.
    """

    __slots__ = ("_ids",)

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids = array("I", ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, position: int) -> int:
        return self._ids[position]

    def append(self, token_id: int) -> None:
        self._ids.append(token_id)

    def ids(self, start: int, stop: int) -> list[int]:
        """The token ids at positions [start, stop)."""
        return self._ids[start:stop].tolist()

    def packed(self, start: int, stop: int) -> bytes:
        """The same run as bytes, TOKEN_BYTES for each token."""
        return self._ids[start:stop].tobytes()

    def copy(self) -> "Tokens":
        return Tokens(self._ids)


def unpacked(packed: bytes) -> list[int]:
    """The token ids of a packed run."""
    return array("I", packed).tolist()


def common_tokens(left: bytes, right: bytes) -> int:
    """Length in tokens of the longest common prefix of two packed runs, by bisection."""
    low, high = 0, min(len(left), len(right)) // TOKEN_BYTES
    if left[: high * TOKEN_BYTES] == right[: high * TOKEN_BYTES]:
        return high
    while low + 1 < high:  # left[:low] == right[:low], left[:high] != right[:high]
        middle = (low + high) // 2
        if (
            left[low * TOKEN_BYTES : middle * TOKEN_BYTES]
            == (right[low * TOKEN_BYTES : middle * TOKEN_BYTES])
        ):
            low = middle
        else:
            high = middle
    return low
