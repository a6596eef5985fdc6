"""The attention that serves where several can: for each number of rows and keys the fastest."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from engine.api import one_line
from engine.mlx_backend.host import is_lack_of_memory
from engine.mlx_backend.kv.arena import Arena
from engine.mlx_backend.kv.shape import LayerShape
from engine.mlx_backend.model.attention import (
    Attention,
    BlockAttention,
    ListedWork,
    PrepareDecodeRows,
    ShortRowAttention,
)
from engine.mlx_backend.model.rows import BlockTable, Counts, RowGroup
from engine.values.attention import GATHER, TimedCell, nearest_cell

logger = logging.getLogger(__name__)

Tables: TypeAlias = Mapping[int | None, Sequence[TimedCell]]
"""Times of attentions in each arena, by window. An arena without times has `gather`."""


class ChosenAttention(ShortRowAttention):
    """Attends by the fastest of several attentions, which were compared in decodes. A compiled step
    has the one that was chosen when it was traced.

    Where one fails, `gather` serves from then on. A lack of memory is not its failure: it goes on
    to serve.
    """

    def __init__(
        self,
        candidates: Mapping[str, Attention],
        tables: Tables,
        block_size: int,
        on_failure: Callable[[str], None] = lambda why: None,
    ) -> None:
        """`candidates` by name, `gather` among them. `on_failure` takes the reason, once."""
        serving = {cell.fastest for cells in tables.values() for cell in cells}
        if not all(tables.values()):
            serving.add(GATHER)
        self.names = [name for name in candidates if name in serving]
        padding_keys = min(of.padding_keys for of in candidates.values())
        super().__init__(candidates[GATHER], padding_keys)
        self.name = ", ".join(self.names)
        self.gathered_copies = max(of.gathered_copies for of in candidates.values())
        self.in_place_tokens = min(candidates[name].in_place_tokens for name in self.names)
        self.fallback: Attention | None = self.gather
        self._candidates = candidates
        self._tables = tables
        self._block_size = block_size
        self._on_failure = on_failure

    def prepare_short(self, group: RowGroup, window: int | None) -> BlockAttention | None:
        return self._chosen(group.rows, group.n_keys, window).prepare(group, window)

    def prepare_decode(
        self, rows: int, width: int, arena: Arena, window: int | None, sizes: tuple[int, ...]
    ) -> PrepareDecodeRows | None:
        chosen = self._chosen(rows, width * arena.block_size, window)
        return chosen.prepare_decode(rows, width, arena, window, sizes)

    def list_work(
        self, table: BlockTable, n_blocks: Counts, arena: Arena, window: int | None
    ) -> ListedWork | None:
        rows, width = table.shape
        chosen = self._chosen(rows, width * arena.block_size, window)
        return chosen.list_work(table, n_blocks, arena, window)

    def partial_bytes(
        self, shape: LayerShape, query_heads: int, block_size: int, n_tokens: int, longest: int
    ) -> int:
        of = shape, query_heads, block_size, n_tokens, longest
        return max(self._candidates[name].partial_bytes(*of) for name in self.names)

    def covers(self, arena: Arena) -> bool:
        return all(self._candidates[name].covers(arena) for name in self.names)

    def shares_prefixes(self, table: BlockTable) -> bool:
        rows, width = table.shape
        return self._chosen(rows, width * self._block_size, None).shares_prefixes(table)

    def give_up(self, error: Exception) -> None:
        self.fallbacks += 1
        if self.problem or is_lack_of_memory(error):
            return
        self.problem = f"{type(error).__name__}: {one_line(error)}"
        self.in_place_tokens = 0
        self.fallback = None  # a forward that fails with `gather` has failed
        logger.warning("attention: gather from now on: %s", self.problem)
        self._on_failure(self.problem)

    def _chosen(self, rows: int, keys: int, window: int | None) -> Attention:
        """The attention of this many rows and keys of each."""
        cells = self._tables.get(window, ())
        if self.problem or not cells:
            return self.gather
        return self._candidates[nearest_cell(cells, rows, max(keys, 1)).fastest]
