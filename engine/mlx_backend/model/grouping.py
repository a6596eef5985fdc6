"""Which pieces run side by side as the rows of one shape, so that little of it is padding."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.mlx_backend.model.forward import Piece

FORWARD_TOKENS = 16
"""What one more forward costs, in tokens computed: padding below this is cheaper than a forward.

A forward reads all weights however few its tokens are: with 27 M parameters on two cores one row of
one token takes 12 ms without attention, and a token more in a chunk 0.6 ms.
"""

Groups = list[list[int]]
"""Rows side by side, as lists of indices into some pieces."""


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """What one more forward costs: as much as padding rows by so many tokens, or by so many keys
    that attention reads for each.

    `most_keys`: those that one forward of several rows may read. `layers`: whoever reads no logits
    of a run has the last one computed in vain, but for attention, where it shares a forward.
    `context_tokens`: no row is padded beyond the last of these positions.
    """

    tokens: int
    keys: float
    most_keys: float = math.inf
    layers: int = 1
    context_tokens: float = math.inf

    def joins(self, piece: Piece) -> bool:
        """Whether that is no more than what one more forward costs."""
        return piece.n_tokens == 1 or piece.n_tokens / self.layers <= self.tokens


Grouping = Callable[[Sequence[Piece], ForwardCost], Groups]
"""Splits pieces into groups of rows side by side, where padding would cost more than one more."""


def group_by_length(lengths: Sequence[int], most_padding: float) -> Groups:
    """Split what is padded to one length into groups, as lists of indices into `lengths`.

    They are taken longest first; each joins the group before it unless the padding of that group
    would then outweigh one more. Within a group they stay in order.
    """
    groups: Groups = []
    longest = padding = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        padding += longest - lengths[index]
        if not groups or padding > most_padding:
            groups.append([])
            longest, padding = lengths[index], 0
        groups[-1].append(index)
    return [sorted(group) for group in groups]


def padded(pieces: Sequence[Piece], cost: ForwardCost) -> Groups:
    """Rows of like length and like context, padded to the longest."""
    return [
        [group[index] for index in part]
        for alike in group_by_length([piece.n_tokens for piece in pieces], cost.tokens)
        for group in _within_context(alike, pieces, cost.context_tokens)
        for part in group_by_length([pieces[index].stop for index in group], cost.keys)
    ]


def _within_context(group: Sequence[int], pieces: Sequence[Piece], context_tokens: float) -> Groups:
    """Rows that can be padded to the longest, and the others by their lengths: a model with a table
    of positions has none behind them, and MLX reads on where a table ends.
    """
    length = max(pieces[index].n_tokens for index in group)
    fitting = [index for index in group if pieces[index].start + length <= context_tokens]
    others = [index for index in group if pieces[index].start + length > context_tokens]
    alike = group_by_length([pieces[index].n_tokens for index in others], 0)
    parts = [fitting, *([others[index] for index in part] for part in alike)]
    return [part for part in parts if part]


def of_equal_length(pieces: Sequence[Piece], cost: ForwardCost) -> Groups:
    """Rows of one length: for recurrent layers that take padding for tokens."""
    return padded(pieces, replace(cost, tokens=0))


def fresh_apart(pieces: Sequence[Piece], cost: ForwardCost) -> Groups:
    """Of equal length, and those that begin apart: for layers that have no initial state."""
    groups = of_equal_length(pieces, cost)
    parts = [
        [index for index in group if (pieces[index].start == 0) is is_fresh]
        for group in groups
        for is_fresh in (True, False)
    ]
    return [part for part in parts if part]


def one_by_one(pieces: Sequence[Piece], cost: ForwardCost) -> Groups:
    """Each row alone: for models that ask for one position, or count keys from the end."""
    return [[index] for index in range(len(pieces))]


def bounded(grouping: Grouping) -> Grouping:
    """The same grouping, with no group of several rows whose rows x longest exceed `most_keys`.

    A row alone may have any number of keys.
    """

    def group(pieces: Sequence[Piece], cost: ForwardCost) -> Groups:
        found = grouping(pieces, cost)
        return [part for whole in found for part in _split(whole, pieces, cost.most_keys)]

    return group


def _split(whole: list[int], pieces: Sequence[Piece], most_keys: float) -> Groups:
    """Runs of neighbours: rows that share a prefix stay together as far as they fit."""
    parts: Groups = []
    longest = 0
    for index in whole:
        longest = max(longest, pieces[index].stop)
        if parts and (len(parts[-1]) + 1) * longest <= most_keys:
            parts[-1].append(index)
        else:
            parts.append([index])
            longest = pieces[index].stop
    return parts
