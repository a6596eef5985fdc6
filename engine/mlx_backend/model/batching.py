"""How rows of a model may share a forward: a ladder of rules, from best to slowest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from engine.mlx_backend.model.forward import Forward, GroupedMaskForward, LoneForward, Piece
from kvstore.state_arena import StateArena
from kvstore.types import SlotId

FORWARD_TOKENS = 16
"""What one more forward costs, in tokens computed: padding below this is cheaper than a forward.

A forward reads all weights however few its tokens are: with 27 M parameters on two cores one row of
one token takes 12 ms without attention, and a token more in a chunk 0.6 ms.
"""

Groups = list[list[int]]
"""Forwards, as lists of indices into some pieces."""


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """What one more forward costs: as much as padding rows by so many tokens, or by so many keys
    that attention reads for each."""

    tokens: int
    keys: float


Grouping = Callable[[Sequence[Piece], ForwardCost], Groups]
"""Splits pieces into forwards, where padding would cost more than one more."""


ReadStates = Callable[[StateArena, Sequence[SlotId], bool], Sequence[mx.array | None]]
"""The arrays of some slots' states as the model is given them; whether all slots are fresh."""


def initial_or_saved(
    states: StateArena, slots: Sequence[SlotId], is_fresh: bool
) -> Sequence[mx.array | None]:
    """A fresh row begins with zeros, so that it can run beside others."""
    return states.read(slots)


def none_or_saved(
    states: StateArena, slots: Sequence[SlotId], is_fresh: bool
) -> Sequence[mx.array | None]:
    """A fresh row begins with nothing, as in mlx-lm."""
    return [None] * len(states.shapes) if is_fresh else states.read(slots)


@dataclass(frozen=True, slots=True)
class Batching:
    """A rung of the ladder: which rows run side by side, and what their caches give them."""

    name: str
    group: Grouping
    forward: type[Forward] = Forward
    read_states: ReadStates = initial_or_saved


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
        for group in group_by_length([piece.n_tokens for piece in pieces], cost.tokens)
        for part in group_by_length([pieces[index].stop for index in group], cost.keys)
    ]


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


LADDER = (
    Batching("padded rows", padded),
    Batching("padded rows with masks by KV head", padded, GroupedMaskForward),
    Batching("rows of equal length", of_equal_length),
    Batching("rows of equal length, fresh ones apart", fresh_apart, Forward, none_or_saved),
    Batching("one row at a time", one_by_one, LoneForward, none_or_saved),
)
"""From the fewest forwards to the most. The check at load takes the first that is right."""
