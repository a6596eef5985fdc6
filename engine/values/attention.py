"""Which attention reads the blocks: what a comparison on the user's device has found. Frozen
values.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from annotated_types import Ge, MinLen

GATHER = "gather"
"""The name of the reference, which serves wherever no other attention is faster."""

TIE = 0.95
"""Another attention serves where it takes at most this share of the time of `gather`."""


class TrialState(StrEnum):
    """How far the comparison for a kind of layer has come."""

    TRYING = "trying"  # it has begun; where it is left so, the machine went down
    PASSED = "passed"
    FAILED = "failed"
    POSTPONED = "postponed"  # for lack of memory; it is not kept, so the next start compares again


@dataclass(frozen=True, slots=True)
class TimedCell:
    """Times of one decoded token of each of `rows` rows, with `keys` keys in each row."""

    rows: Annotated[int, Ge(1)]
    keys: Annotated[int, Ge(1)]
    # Medians for one layer, by the name of the attention.
    milliseconds: Annotated[Mapping[str, float], MinLen(1)]

    @property
    def fastest(self) -> str:
        """The name of the attention that serves here."""
        name = min(self.milliseconds, key=self.milliseconds.__getitem__)
        gather = self.milliseconds.get(GATHER, math.inf)
        return name if self.milliseconds[name] <= TIE * gather else GATHER


@dataclass(frozen=True, slots=True)
class AttentionTrial:
    """The comparison for a kind of layer. `kind` describes it in words."""

    kind: str
    state: TrialState
    why: str = ""  # the reason of a failure
    cells: tuple[TimedCell, ...] = ()
    rejected: Mapping[str, str] = field(default_factory=dict)  # why not, by the attention's name


def nearest_cell(cells: Sequence[TimedCell], rows: int, keys: int) -> TimedCell:
    """The cell that stands for `rows` rows of `keys` keys: of the nearest number of rows, and then
    of the nearest number of keys, both by ratio.
    """

    def distance(cell: TimedCell) -> tuple[float, float]:
        return abs(math.log(cell.rows / rows)), abs(math.log(cell.keys / keys))

    return min(cells, key=distance)
