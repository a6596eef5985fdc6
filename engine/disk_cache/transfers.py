"""Limits on the bytes that a step moves and on concurrent loads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

NEWEST_SHARE = 0.25
"""The weight of the latest step in the average of `BytePace`."""

AHEAD_STEPS = 2
"""Loads are read ahead by what this many steps fill in: what the step in flight fills in is held
until that is committed, in addition to what the next one will fill in.
"""

TICKETS = 2
"""The number of loads that share the read-ahead before others get any: one for each reader."""


class BytePace:
    """A moving average of seconds a byte, learned from steps that moved bytes.

    The fixed cost of moving anything is spread over the bytes of each step, so the number of bytes
    that a step may move converges to what fits into its time.
    """

    def __init__(self) -> None:
        self._byte_seconds: float | None = None

    def observe(self, n_bytes: int, seconds: float) -> None:
        """A step took `seconds` longer because it moved `n_bytes`, which is at least 1."""
        seen, known = seconds / n_bytes, self._byte_seconds
        self._byte_seconds = seen if known is None else known + NEWEST_SHARE * (seen - known)

    def seconds(self, n_bytes: int, unseen_rate: float | None = None) -> float:
        """The additional time of a step that moves `n_bytes`. `unseen_rate`: bytes a second to
        assume before the first observation; None: no time.
        """
        return n_bytes * self._per_byte(unseen_rate)

    def bytes_in(self, seconds: float, unseen_rate: float | None = None) -> float:
        """How many bytes a step can move in `seconds`; infinite if that is."""
        if math.isinf(seconds):
            return math.inf
        per_byte = self._per_byte(unseen_rate)
        return seconds / per_byte if per_byte else 0.0

    def _per_byte(self, unseen_rate: float | None) -> float:
        if self._byte_seconds:  # no time at all is less than can be measured
            return self._byte_seconds
        return 1 / unseen_rate if unseen_rate else 0.0


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """Limits in bytes. `held`: pinned by loads. `ahead`: read and not filled in yet."""

    held: int
    ahead: int


UNLIMITED = LoadLimits(1 << 62, 1 << 62)


class LoadBudget:
    """First come, first served, round by round: a load that does not fit is not overtaken in that
    round. A load that is alone always fits.
    """

    def __init__(self, limits: LoadLimits) -> None:
        self._limits = limits
        self._n_loads = 0
        self._held_bytes = 0
        self._is_full = False

    def begin_round(self) -> None:
        """Begin a round in which all waiting loads are tried again."""
        self._is_full = False

    def takes(self, n_bytes: int) -> bool:
        """Whether a load of `n_bytes` may begin. If not, no other load may begin in this round."""
        fits = self._held_bytes + n_bytes <= self._limits.held
        is_taken = not self._n_loads or (fits and not self._is_full)
        self._is_full = not is_taken
        return is_taken

    def began(self, n_bytes: int) -> None:
        self._n_loads += 1
        self._held_bytes += n_bytes

    def ended(self, n_bytes: int) -> None:
        self._n_loads -= 1
        self._held_bytes -= n_bytes

    def ahead(self, step_bytes: float, held: Sequence[int]) -> list[int]:
        """How many bytes each load may be read ahead, the first load served first, where a step
        fills in `step_bytes`. Readers read a run at least. `held`: what each has read and not
        filled in yet. All of it counts, though a load may hold more than it would get now.
        """
        most = self._limits.ahead // max(min(len(held), TICKETS), 1)
        share = int(min(max(AHEAD_STEPS * step_bytes, 1), most))
        left = self._limits.ahead - sum(held)
        shares = []
        for n_bytes in held:
            more = min(max(share - n_bytes, 0), max(left, 0))
            left -= more
            shares.append(min(share, n_bytes + more))
        return shares
