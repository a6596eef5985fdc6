"""Splits forwards that would read more keys at once than there is memory for."""

from collections.abc import Sequence

from engine.mlx_backend.model.batching import ForwardCost, Grouping, Groups
from engine.mlx_backend.model.forward import Piece


def bounded(grouping: Grouping, most_keys: int) -> Grouping:
    """The same grouping, with no forward of several rows whose rows x longest exceed `most_keys`.

    A row alone may have any number of keys.
    """

    def group(pieces: Sequence[Piece], cost: ForwardCost) -> Groups:
        found = grouping(pieces, cost)
        return [part for whole in found for part in _split(whole, pieces, most_keys)]

    return group


def _split(whole: list[int], pieces: Sequence[Piece], most_keys: int) -> Groups:
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
