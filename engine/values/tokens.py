"""Token ids as a frozen value: what a request has of its prompt, in the process of the server and
in that of the engine.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload


@dataclass(frozen=True, slots=True)
class PackedTokens(Sequence[int]):
    """Token ids in 4 bytes each, in machine order. A slice is a copy. Make it with `pack`.

    It goes from process to process as bytes, so reading it takes no time for each token.
    """

    packed: bytes = b""

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> "PackedTokens": ...

    def __getitem__(self, index: int | slice) -> "int | PackedTokens":
        if isinstance(index, slice):
            return PackedTokens(self._ids[index].tobytes())
        return self._ids[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    @property
    def _ids(self) -> "memoryview[int]":
        return memoryview(self.packed).cast("I")


def pack(ids: Iterable[int]) -> PackedTokens:
    """Raises OverflowError for a number that does not fit into 32 bits."""
    return PackedTokens(array("I", ids).tobytes())


NO_TOKENS = PackedTokens()
