"""The largest logits of each row, found by the maxima of blocks of neighbouring tokens."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

_LINES, _LINE_TOKENS = 8, 16
BLOCK_TOKENS = _LINES * _LINE_TOKENS
"""Tokens of a block. A CPU reduces 8 lines of 16 numbers at the speed of its memory."""

_ID_BITS = 32


@dataclass(frozen=True, slots=True)
class Maxima:
    """Rows of logits and the largest logit of each block of BLOCK_TOKENS neighbouring tokens.

    One pass over the logits finds the blocks' maxima; a search then reads a few blocks only.
    All functions are lazy and treat each row on its own.
    """

    logits: mx.array
    """float32 [rows, vocab], filled up with -inf to whole blocks."""
    peaks: mx.array
    """[rows, 1]: the largest logit of the row. NaN where any logit is NaN, -inf where all are."""
    _lines: mx.array
    """The logits [rows, blocks, _LINES, _LINE_TOKENS]."""
    _blocks: mx.array
    """[rows, blocks, 1, 1]: the largest logit of each block."""

    @classmethod
    def of(cls, logits: mx.array) -> "Maxima":
        """The maxima of float32 logits [rows, vocab]."""
        logits = in_whole_blocks(logits)
        rows = len(logits)
        lines = logits.reshape(rows, -1, _LINES, _LINE_TOKENS)
        blocks = lines.max(axis=2, keepdims=True).max(axis=3, keepdims=True)
        return cls(logits, blocks.max(axis=1, keepdims=True).reshape(rows, 1), lines, blocks)

    def at(self, tokens: mx.array) -> mx.array:
        """The logits of some tokens of each row: [rows, n] each."""
        return mx.take_along_axis(self.logits, tokens, axis=1)

    def likeliest(self) -> mx.array:
        """The token [rows] with the largest logit, of equal ones the one with the lowest id.

        It is in the vocabulary whatever the logits, NaN too: argmax takes the first of a row where
        none is larger.
        """
        rows = len(self.logits)
        block = mx.argmax(self._blocks, axis=1, keepdims=True)
        logits = mx.take_along_axis(self._lines, block, axis=1).reshape(rows, 1, 1, BLOCK_TOKENS)
        within = mx.argmax(logits, axis=3, keepdims=True)
        return _token_ids(block, within).reshape(rows)

    def largest(self, count: int) -> mx.array:
        """The tokens [rows, count] with the largest logits, of equal ones the lowest ids first.

        They are in the blocks with the largest maxima, of equal ones in the first.
        """
        rows, n_blocks = self._blocks.shape[:2]
        blocks = _first(self._blocks.reshape(rows, n_blocks), indices(n_blocks), count)
        blocks = blocks[:, :, None, None]
        logits = mx.take_along_axis(self._lines, blocks, axis=1).reshape(rows, -1)
        within = indices(BLOCK_TOKENS).reshape(_LINES, _LINE_TOKENS)
        return _first(logits, (blocks * BLOCK_TOKENS + within).reshape(rows, -1), count)


def in_whole_blocks(logits: mx.array) -> mx.array:
    """Logits [rows, vocab], filled up with -inf to whole blocks."""
    if beyond := -logits.shape[1] % BLOCK_TOKENS:
        return mx.pad(logits, [(0, 0), (0, beyond)], constant_values=-mx.inf)
    return logits


def strips_of(values: mx.array) -> mx.array:
    """Whole blocks [rows, vocab] as [rows, BLOCK_TOKENS, n]: token t is at [t // n, t % n].

    Nothing is faster on a CPU than to reduce the middle axis: it adds whole strips.
    """
    return values.reshape(len(values), BLOCK_TOKENS, -1)


def totals(values: mx.array) -> mx.array:
    """The sum of each row of whole blocks: [rows, 1]."""
    return strips_of(values).sum(axis=1).sum(axis=1, keepdims=True)


def indices(count: int) -> mx.array:
    """uint32 [count]: 0, 1, 2, ... For a function that is compiled they are a constant."""
    return mx.array(np.arange(count, dtype=np.uint32))


def _first(values: mx.array, ids: mx.array, count: int) -> mx.array:
    """The ids of the `count` largest values [rows, n], or of all where n is less, the largest
    first; of equal values the lowest id first.

    Value and id are one integer, so that no two are equal and any partition finds the same.
    """
    keys = _keys(values.view(mx.int32), ids)
    if count < keys.shape[1]:
        keys = mx.partition(keys, count - 1, axis=1)[:, :count]
    return mx.sort(keys, axis=1).astype(mx.uint32)  # the lower half of each is the id


@mx.compile
def _keys(bits: mx.array, ids: mx.array) -> mx.array:
    """Integers that fall as values rise, and rise with the ids of equal values."""
    falling = mx.where(bits < 0, bits & 0x7FFFFFFF, -bits)  # IEEE 754 is a sign and a size
    keys: mx.array = falling.astype(mx.int64) * 2**_ID_BITS + ids.astype(mx.int64)
    return keys


@mx.compile
def _token_ids(blocks: mx.array, within: mx.array) -> mx.array:
    return blocks * BLOCK_TOKENS + within
