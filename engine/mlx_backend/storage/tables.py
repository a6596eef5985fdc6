"""A sequence's tables as the runner keeps them: uint32 arrays that plans patch."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from engine.mlx_backend.model.forward import TokenSpan
from kvstore.actions import TablePatch

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
        """All up to the last one that was given. A view: read it before the next patch."""
        return self._ids[: self._end]

    def patch(self, first: int, ids: Sequence[int]) -> None:
        self._end = max(self._end, first + len(ids))
        if self._end > len(self._ids):
            grown = np.zeros(max(self._end, 2 * len(self._ids)), dtype=np.uint32)
            grown[: len(self._ids)] = self._ids
            self._ids = grown
        self._ids[first : first + len(ids)] = ids


class SequenceTables:
    """The table of a sequence's blocks, and those of its slots in each group."""

    __slots__ = ("_blocks", "_groups")

    def __init__(self, n_groups: int) -> None:
        self._blocks = Table()
        self._groups = tuple(Table() for _ in range(n_groups))

    @property
    def blocks(self) -> Ids:
        return self._blocks.ids

    def patch(self, patch: TablePatch) -> None:
        table = self._blocks if patch.group is None else self._groups[patch.group]
        table.patch(patch.first, patch.ids)

    def span(
        self, start: int, n_tokens: int, index: int, first_token: int, n_read: int
    ) -> TokenSpan:
        """Tokens of the sequence, from position `start` on; see `TokenSpan`."""
        groups = tuple(table.ids for table in self._groups)
        return TokenSpan(
            start,
            n_tokens,
            self._blocks.ids,
            groups=groups,
            index=index,
            first_token=first_token,
            n_read=n_read,
        )
