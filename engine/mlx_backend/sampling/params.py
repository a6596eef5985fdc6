"""The parameters of draws as arrays on the device."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.mlx_backend.exponential import LOWEST_SCORE
from engine.values.request import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures under this are 0: the quotients would be beyond float32's precision anyway."""

ALL_TOKENS = 2**31 - 1
"""A top_k that cuts nothing."""


class DrawParams(NamedTuple):
    """What draws depend on besides the logits, one line for each row."""

    keys: mx.array
    """uint32 [rows, 1, 2]: 32 bits of the seed, and the index of the token in the output."""
    coldness: mx.array
    """float32 [rows, 1, 1, 1]: 1 / temperature."""
    least_score: mx.array
    """float32 [rows, 1, 1, 1]: the logarithm of min_p, below which a score is cut. A token's score
    is its logit less the row's largest, times the coldness."""
    top_k: mx.array
    """int32 [rows, 1, 1, 1]."""
    top_p: mx.array
    """float32 [rows, 1, 1, 1]; infinite where it is 1, for that cuts nothing, whatever the
    rounding."""
    xtc_probability: mx.array
    """float32 [rows, 1, 1, 1]; 0 where it is off."""
    xtc_threshold: mx.array
    """float32 [rows, 1, 1, 1]."""

    @classmethod
    def of(
        cls, rows: Sequence[SamplingParams], seeds: Sequence[int], output_indices: Sequence[int]
    ) -> "DrawParams":
        keys = list(zip(map(_digest, seeds), output_indices, strict=True))
        return cls(
            mx.array(np.array(keys, dtype=np.uint32)[:, None]),
            _column(1 / max(row.temperature, GREEDY_BELOW) for row in rows),
            _column(math.log(max(row.min_p, math.exp(LOWEST_SCORE))) for row in rows),
            _column((min(row.top_k or ALL_TOKENS, ALL_TOKENS) for row in rows), np.int32),
            _column(row.top_p if row.top_p < 1 else math.inf for row in rows),
            _column(row.xtc.probability if row.xtc else 0 for row in rows),
            _column(row.xtc.threshold if row.xtc else 1 for row in rows),
        )


def _digest(seed: int) -> int:
    """32 bits of a seed modulo 2^64. Seeds from 0 to 2^32 - 1 are their own digests."""
    seed %= 2**64
    return (seed + (seed >> 32) * 0x9E3779B1) % 2**32


def _column(values: Iterable[float], dtype: npt.DTypeLike = np.float32) -> mx.array:
    return mx.array(np.array(list(values), dtype=dtype)[:, None, None, None])
