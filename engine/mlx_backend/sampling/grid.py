"""Logits seen as a grid, so that a vocabulary is searched in two short steps."""

from dataclasses import dataclass

import mlx.core as mx

MAX_STRIPS = 64
"""About the square root of a vocabulary divided by some dozens of candidates."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A row of a vocabulary's values as strips of neighbours, one below the other.

             column 0   1   2  ...
    strip 0        t0  t1  t2  ...      token = strip * columns + column
    strip 1        tc  ..              reductions along columns are the fastest that a CPU has:
      ...                              they add, or compare, whole strips

    All functions are lazy, and take a row for itself.
    """

    strips: int
    columns: int

    @classmethod
    def of(cls, vocab_size: int) -> "Grid":
        """The grid with the most strips, up to MAX_STRIPS, that leaves no place empty."""
        strips = max(n for n in range(1, MAX_STRIPS + 1) if vocab_size % n == 0)
        return cls(strips, vocab_size // strips)

    def fold(self, values: mx.array) -> mx.array:
        """`values` [rows, vocab] as [rows, strips, columns]."""
        return values.reshape(len(values), self.strips, self.columns)

    def peaks(self, values: mx.array) -> mx.array:
        """The largest of each row [rows, 1]: NaN if any is, -inf if all are."""
        return self.fold(values).max(axis=1).max(axis=1, keepdims=True)

    def totals(self, values: mx.array) -> mx.array:
        """The sum of each row: [rows, 1]."""
        return self.fold(values).sum(axis=1).sum(axis=1, keepdims=True)

    def column(self, values: mx.array, columns: mx.array) -> mx.array:
        """Some columns of `values` [rows, vocab]: [rows, n] to [rows, strips, n]."""
        return mx.take_along_axis(self.fold(values), columns[:, None, :], axis=2)

    def find(self, values: mx.array, wanted: mx.array, nth: mx.array) -> mx.array:
        """The token [rows] where a row's `wanted` value [rows, 1] stands, in the order of ids.

        `nth` [rows, 1] counts equal values before it. Where there are not so many, any token.
        """
        equal = self.fold(values == wanted)
        in_strips = mx.cumsum(equal.sum(axis=2), axis=1)
        strip = _first_above(in_strips, nth)
        before = mx.where(strip > 0, mx.take_along_axis(in_strips, mx.maximum(strip, 1) - 1, 1), 0)
        inside = mx.take_along_axis(equal, strip[:, :, None], axis=1)[:, 0]
        column = _first_above(mx.cumsum(inside.astype(mx.int32), axis=1), nth - before)
        return self.tokens(strip, column)[:, 0]

    def largest(self, values: mx.array, count: int) -> tuple[mx.array, mx.array]:
        """The largest of each row's values [rows, vocab], and their tokens, in no order.

        [rows, min(count, vocab)] each. Of equal ones, any. They stand in the columns of the largest
        maxima.
        """
        count = min(count, self.strips * self.columns)
        maxima = self.fold(values).max(axis=1)
        columns = _places_of_largest(maxima, min(count, self.columns))
        tokens = self.tokens(mx.arange(self.strips, dtype=mx.uint32)[:, None], columns[:, None, :])
        candidates = self.column(values, columns).reshape(len(values), -1)
        best = _places_of_largest(candidates, count)
        return (
            mx.take_along_axis(candidates, best, axis=1),
            mx.take_along_axis(tokens.reshape(len(values), -1), best, axis=1),
        )

    def tokens(self, strips: mx.array, columns: mx.array) -> mx.array:
        return strips.astype(mx.uint32) * self.columns + columns.astype(mx.uint32)


def _first_above(rising: mx.array, bound: mx.array) -> mx.array:
    """The place [rows, 1] of the first of `rising` [rows, n] above the bound [rows, 1]."""
    return mx.argmax(rising > bound, axis=1, keepdims=True)


def _places_of_largest(values: mx.array, count: int) -> mx.array:
    return mx.argpartition(-values, count - 1, axis=1)[:, :count]
