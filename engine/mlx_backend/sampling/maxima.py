"""Logits with their maxima by neighbourhood, so that one pass over them serves every search."""

from dataclasses import dataclass
from functools import partial

import mlx.core as mx

COLUMNS, DEPTH = 16, 8
BLOCK = COLUMNS * DEPTH
"""Tokens of a block. DEPTH is what a pass over memory can reduce at full speed on a CPU."""

_ID_BITS = 32


@dataclass(frozen=True, slots=True)
class Maxima:
    """Rows of logits in blocks of neighbours, each of DEPTH lines of COLUMNS tokens.

        block b, line 0:   128 b        128 b + 1    ...  128 b + 15
                 line 1:   128 b + 16   ...
                 ...       a column's tokens stand one below the other

    All functions are lazy, and take a row for itself. `peaks` are NaN where any logit is, and -inf
    where all are.
    """

    logits: mx.array
    """[rows, vocab], filled up with -inf to whole blocks."""
    columns: mx.array
    """[rows, blocks, COLUMNS]: the largest of each column."""
    blocks: mx.array
    """[rows, blocks]: the largest of each block."""
    peaks: mx.array
    """[rows, 1]: the largest of all."""

    @classmethod
    def of(cls, logits: mx.array) -> "Maxima":
        """The maxima of float32 logits [rows, vocab]."""
        rows, vocab_size = logits.shape
        if beyond := -vocab_size % BLOCK:
            logits = mx.pad(logits, [(0, 0), (0, beyond)], constant_values=-mx.inf)
        columns = logits.reshape(rows, -1, DEPTH, COLUMNS).max(axis=2)
        blocks = columns.max(axis=2)
        return cls(logits, columns, blocks, blocks.max(axis=1, keepdims=True))

    def of_rows(self, rows: mx.array) -> "Maxima":
        return Maxima(self.logits[rows], self.columns[rows], self.blocks[rows], self.peaks[rows])

    def at(self, tokens: mx.array) -> mx.array:
        """The logits of some tokens of each row: [rows, n] each."""
        return mx.take_along_axis(self.logits, tokens, axis=1)

    def likeliest(self) -> mx.array:
        """The token [rows, 1] with the largest logit, of equal ones the one with the lowest id."""
        blocks = mx.argmax(self.blocks, axis=1, keepdims=True)
        tokens = _tokens_in(blocks)
        return mx.take_along_axis(tokens, mx.argmax(self.at(tokens), axis=1, keepdims=True), axis=1)

    def largest(self, count: int) -> mx.array:
        """The tokens [rows, count] with the largest logits, of equal ones the lowest ids first.

        They stand in the blocks with the largest maxima, of equal ones the first.
        """
        n_blocks = self.blocks.shape[1]
        ids = mx.broadcast_to(mx.arange(n_blocks, dtype=mx.uint32), self.blocks.shape)
        tokens = _tokens_in(_first(self.blocks, ids, min(count, n_blocks)))
        return _first(self.at(tokens), tokens, count)


def strips_of(values: mx.array) -> mx.array:
    """Whole blocks [rows, vocab] as [rows, BLOCK, vocab / BLOCK]. Reductions along the strips
    are the fastest that a CPU has: they add whole strips.
    """
    return values.reshape(len(values), BLOCK, -1)


def totals(values: mx.array) -> mx.array:
    """The sum of each row of whole blocks: [rows, 1]."""
    return strips_of(values).sum(axis=1).sum(axis=1, keepdims=True)


def _tokens_in(blocks: mx.array) -> mx.array:
    """All tokens of some blocks of each row: [rows, n] to [rows, n * BLOCK]."""
    tokens = blocks[:, :, None].astype(mx.uint32) * BLOCK + mx.arange(BLOCK, dtype=mx.uint32)
    return tokens.reshape(len(blocks), -1)


def _first(values: mx.array, ids: mx.array, count: int) -> mx.array:
    """The ids of the `count` largest values [rows, n], in order; of equal ones the lowest first.

    Value and id are one integer, so that no two are equal and any partition finds the same.
    """
    keys = _keys((values + 0.0).view(mx.int32), ids)  # -0.0 is 0.0
    if count < keys.shape[1]:
        keys = mx.partition(keys, count - 1, axis=1)[:, :count]
    return mx.bitwise_and(mx.sort(keys, axis=1), 2**_ID_BITS - 1).astype(mx.uint32)


@partial(mx.compile, shapeless=True)
def _keys(bits: mx.array, ids: mx.array) -> mx.array:
    """Integers that fall as values rise, and rise with the ids of equal values."""
    falling = mx.where(bits < 0, bits & 0x7FFFFFFF, ~bits)  # IEEE 754 is a sign and a size
    keys: mx.array = falling.astype(mx.int64) * 2**_ID_BITS + ids.astype(mx.int64)
    return keys
