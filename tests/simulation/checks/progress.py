"""Whether anything moves, in turns and not in seconds: a stuck engine is found at once."""


class Watchdog:
    """Told after each turn whether work waits, and how far everything has come by now."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._come: tuple[int, ...] = ()
        self._turns = 0

    def turned(self, *come: int, is_waiting: bool) -> None:
        """Raises AssertionError when nothing has moved for so many turns with work waiting."""
        self._turns = self._turns + 1 if is_waiting and come == self._come else 0
        self._come = come
        assert self._turns <= self._patience, (
            f"no progress in {self._turns} turns with work waiting: {come}"
        )
