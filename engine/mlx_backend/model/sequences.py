"""What forwards are given of a sequence: the tables of its blocks and slots, and its adapter."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.ops import TablePatch

Ids: TypeAlias = npt.NDArray[np.uint32]

_LEAST_IDS = 16


class Table:
    """Block or slot ids, one for each block of a sequence. It grows by doubling."""

    __slots__ = ("_end", "_ids")

    def __init__(self) -> None:
        self._ids: Ids = np.zeros(_LEAST_IDS, dtype=np.uint32)
        self._end = 0

    @property
    def ids(self) -> Ids:
        """All ids, up to the last one that was set. A view: read it before the next patch."""
        return self._ids[: self._end]

    def patch(self, first: int, ids: Sequence[int]) -> None:
        self._end = max(self._end, first + len(ids))
        if self._end > len(self._ids):
            grown = np.zeros(max(self._end, 2 * len(self._ids)), dtype=np.uint32)
            grown[: len(self._ids)] = self._ids
            self._ids = grown
        self._ids[first : first + len(ids)] = ids


class SequenceTables:
    """The table of a sequence's blocks, those of its slots in each group, and its adapter."""

    __slots__ = ("_blocks", "_groups", "adapter", "version")

    def __init__(self, n_groups: int, adapter: str = "") -> None:
        self.adapter = adapter
        self.version = 0  # changes with every patch
        self._blocks = Table()
        self._groups = tuple(Table() for _ in range(n_groups))

    def ids(self, group: int | None) -> Ids:
        """The ids of the sequence's blocks, or of its slots in a group: a view."""
        return (self._blocks if group is None else self._groups[group]).ids

    def patch(self, patch: TablePatch) -> None:
        table = self._blocks if patch.group is None else self._groups[patch.group]
        table.patch(patch.first, patch.ids)
        self.version += 1
