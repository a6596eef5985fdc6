"""Counts the bytes of K and V that thread groups read where rows share a prefix."""

from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from engine.mlx_backend.gpu.work_units import make_units
from tests.kernel_proof.cases import case_arrays, layer
from tests.kernel_proof.program import build, run

PREFIX_BLOCKS, OWN_BLOCKS = 24, 2
ROWS = (1, 4, 8, 32)


class Reads(NamedTuple):
    """Bytes of K and V, of a prefix that `rows` rows share and of their own blocks: as each thread
    group reads them, alone and from a list that shares the prefix; `tiles` is how often the prefix
    must be read then; and how many bytes there are.
    """

    rows: int
    tiles: int
    alone: int
    shared: int
    distinct: int
    expected: int


def count_reads(folder: Path, compiler: str) -> list[Reads]:
    """The reads of a decode, by the number of rows."""
    of = layer((64, 64), kv_heads=1, group=4)
    kind, found = of.kind, list[Reads]()
    program = build(kind, folder, compiler)
    block_bytes = kind.block_size * of.shape.token_bytes
    for rows in ROWS:
        own = PREFIX_BLOCKS + np.arange(rows * OWN_BLOCKS).reshape(rows, -1)
        prefix = np.broadcast_to(np.arange(PREFIX_BLOCKS), (rows, PREFIX_BLOCKS))
        table = np.concatenate([prefix, own], axis=1).astype(np.uint32)
        stops = np.full(rows, table.shape[1] * kind.block_size, np.int32)
        n_vectors = (PREFIX_BLOCKS + own.size) * kind.block_size
        plane = mx.random.normal((2 * n_vectors, kind.key_dim)).astype(mx.bfloat16)
        queries = mx.random.normal((rows, kind.group, 1, kind.key_dim)).astype(mx.bfloat16)
        cases = []
        for min_saved_blocks in (10**6, 1):
            work = make_units(kind, table, stops - 1, stops, 1, None, min_saved_blocks)
            first, none = np.zeros(max(rows, 8), np.int32), np.zeros(8, np.float32)
            last = stops[:, None] - 1
            cases.append(
                case_arrays([[plane]] * 2, queries, table, work, last, first, none, n_vectors)
            )
        alone, shared = run(program, cases)
        tiles = -(-rows * kind.group // kind.tile_queries)
        found.append(
            Reads(
                rows,
                tiles,
                alone.read_bytes,
                shared.read_bytes,
                shared.distinct_bytes,
                (tiles * PREFIX_BLOCKS + own.size) * block_bytes,
            )
        )
    return found
