"""The largest logits of each row, found through the maxima of blocks of neighbouring tokens."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

_LINES, _LINE_TOKENS = 8, 16
BLOCK_TOKENS = _LINES * _LINE_TOKENS
"""Tokens of a block. A CPU reduces 8 lines of 16 numbers at the speed of its memory."""

_ID_BITS = 32
_WITHIN_BLOCK = np.arange(BLOCK_TOKENS, dtype=np.uint32).reshape(_LINES, _LINE_TOKENS)


@dataclass(frozen=True, slots=True)
class Maxima:
    """Rows of logits and the largest logit of each block of BLOCK_TOKENS neighbouring tokens.

    One pass over the logits finds the blocks' maxima; a search then reads a few blocks only.
    All functions are lazy and treat each row on its own.
    """

    logits: mx.array
    """float32 [rows, vocab], filled up with -inf to whole blocks."""
    peaks: mx.array
    """[rows, 1, 1, 1]: the row's largest logit. NaN where any logit is NaN, -inf where all are."""
    _last_token: int
    _lines: mx.array
    """The logits [rows, blocks, _LINES, _LINE_TOKENS]."""
    _blocks: mx.array
    """[rows, blocks, 1, 1]: the largest logit of each block."""

    @classmethod
    def of(cls, logits: mx.array) -> "Maxima":
        """The maxima of float32 logits [rows, vocab]."""
        padded = _in_whole_blocks(logits)
        lines = padded.reshape(len(logits), -1, _LINES, _LINE_TOKENS)
        blocks = lines.max(axis=2, keepdims=True).max(axis=3, keepdims=True)
        peaks = blocks.max(axis=1, keepdims=True)
        return cls(padded, peaks, logits.shape[1] - 1, lines, blocks)

    def likeliest(self) -> mx.array:
        """The token [rows] with the largest logit, of equal ones the one with the lowest id.

        It is in the vocabulary whatever the logits, NaN too: argmax takes the first of a row where
        none is larger.
        """
        rows = len(self.logits)
        block = mx.argmax(self._blocks, axis=1, keepdims=True)
        logits = mx.take_along_axis(self._lines, block, axis=1).reshape(rows, 1, 1, BLOCK_TOKENS)
        within = mx.argmax(logits, axis=3, keepdims=True)
        return _token_ids(block, within)

    def largest(self, count: int) -> tuple[mx.array, mx.array]:
        """The tokens with the largest logits, of equal ones the lowest ids first, and these logits:
        [rows, count, 1, 1] each, the largest first. They are in the vocabulary, NaN or not.

        They are in the blocks with the largest maxima, of equal ones in the first. Value and id are
        sorted as one integer, so that no two are equal and any partition finds the same.
        """
        rows, n_blocks = self._blocks.shape[:2]
        block_keys = _keys(self._blocks, indices(n_blocks, axis=1))
        blocks = _least(block_keys, count).astype(mx.uint32)
        lines = mx.take_along_axis(self._lines, blocks, axis=1)
        keys = _token_keys(lines, blocks).reshape(rows, -1, 1, 1)
        keys = mx.sort(_least(keys, count), axis=1)
        tokens, bits = _tokens_and_bits(keys, self._last_token)
        return tokens, bits.view(mx.float32)


def _in_whole_blocks(logits: mx.array) -> mx.array:
    """Logits [rows, vocab], filled up with -inf to whole blocks."""
    if beyond := -logits.shape[1] % BLOCK_TOKENS:
        return mx.pad(logits, [(0, 0), (0, beyond)], constant_values=-mx.inf)
    return logits


def strips_of(logits: mx.array) -> mx.array:
    """Logits [rows, vocab] as [rows, BLOCK_TOKENS, 1, n], filled up with -inf: token t is at
    [t // n, 0, t % n].

    Nothing is faster on a CPU than to reduce the second axis: it adds whole strips.
    """
    return _in_whole_blocks(logits).reshape(len(logits), BLOCK_TOKENS, 1, -1)


def total_of(strips: mx.array) -> mx.array:
    """The sum of each row of strips: [rows, 1, 1, 1]."""
    return strips.sum(axis=1, keepdims=True).sum(axis=3, keepdims=True)


def indices(count: int, axis: int) -> mx.array:
    """0, 1, 2, ... along one of four axes: uint32. For a function that is compiled they are a
    constant."""
    shape = [1, 1, 1, 1]
    shape[axis] = count
    return mx.array(np.arange(count, dtype=np.uint32).reshape(shape))


def _least(keys: mx.array, count: int) -> mx.array:
    """The `count` smallest keys [rows, n, 1, 1], or all of them where n is less, in any order."""
    if count < keys.shape[1]:
        return mx.partition(keys, count - 1, axis=1)[:, :count]
    return keys


@mx.compile
def _keys(values: mx.array, ids: mx.array) -> mx.array:
    """int64 keys that fall as values rise, and rise with the ids of equal values: the lower half of
    a key is the id."""
    bits = values.view(mx.int32)
    falling = mx.where(bits < 0, bits & 0x7FFFFFFF, -bits)  # IEEE 754 is a sign and a size
    keys: mx.array = falling.astype(mx.int64) * 2**_ID_BITS + ids.astype(mx.int64)
    return keys


@mx.compile
def _token_keys(lines: mx.array, blocks: mx.array) -> mx.array:
    return _keys(lines, _token_ids(blocks, mx.array(_WITHIN_BLOCK)))


@mx.compile
def _tokens_and_bits(keys: mx.array, last_token: int) -> tuple[mx.array, mx.array]:
    """The ids of keys, and the bits of their values; those of -0 are those of 0. A NaN whose sign
    is set sorts after the padding, which begins after the last token."""
    falling = (keys >> _ID_BITS).astype(mx.int32)
    bits = mx.where(falling > 0, falling | -(2**31), -falling)
    return mx.minimum(keys.astype(mx.uint32), last_token), bits


@mx.compile
def _token_ids(blocks: mx.array, within: mx.array) -> mx.array:
    return blocks * BLOCK_TOKENS + within
