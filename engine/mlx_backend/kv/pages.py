"""Gives the system's pages below free blocks back, in arenas whose memory is the machine's.

On Linux `madvise` takes pages from an array on a CPU, and the next access to them gets pages of
zeros. So the arena is as large as before, and takes memory only where blocks are used.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby

import mlx.core as mx
import numpy as np

from engine.mlx_backend.kv.arena import Arena

MADV_DONTNEED = 4  # <asm-generic/mman-common.h>


def can_release_pages() -> bool:
    """Whether arrays of the default device lie in pages that can be given back."""
    return sys.platform == "linux" and mx.default_device() == mx.cpu


def release_pages(arena: Arena, blocks: Sequence[int]) -> None:
    """Give back the pages that lie wholly in these blocks, which hold zeros then or what they held.
    Nothing may be in flight. Does nothing for pages that are gone already.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for first, n_blocks in _runs(arena, blocks):
        for layer in arena.layers:
            for plane, row, n_rows in layer.runs(first, n_blocks):
                row_bytes = plane.nbytes // max(len(plane), 1)
                start = _address(plane) + row * row_bytes
                begin = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
                end = (start + n_rows * row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
                if begin < end:  # an error leaves the pages where they are
                    madvise(begin, end - begin, MADV_DONTNEED)


def _runs(arena: Arena, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive places that have memory: the first, and how many."""
    places = sorted(arena.place(block) for block in blocks if block < arena.n_allocated)
    for _, run in groupby(enumerate(places), lambda each: each[1] - each[0]):
        found = [place for _, place in run]
        yield found[0], len(found)


def _address(plane: mx.array) -> int:
    """Where a plane lies in memory. What refers to it is gone when this returns: MLX would copy the
    plane at its next write.
    """
    return int(np.asarray(plane.view(mx.uint8)).ctypes.data)
