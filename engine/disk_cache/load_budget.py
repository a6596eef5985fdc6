"""Which loads may be under way at once, and how far each is read ahead of what is filled in."""

from collections.abc import Sequence
from dataclasses import dataclass

AHEAD_STEPS = 2
"""What the step in flight fills in is held until it is committed, beside what the next one will."""

TICKETS = 2
"""So many loads share what may be read ahead before others get any: one for each reader."""


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """In bytes. `held`: what loads have pinned blocks for. `ahead`: read and not filled in yet."""

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
        """All waiting loads are tried again."""
        self._is_full = False

    def takes(self, n_bytes: int) -> bool:
        """Whether a load of so many bytes may begin; if not, no other may in this round."""
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
