"""A machine whose memory is as short as a test says."""

from engine.values.pressure import PressureSource, Reading


class ScriptedSources:
    """One source, of which `share` is in use."""

    def __init__(self) -> None:
        self.share = 0.0
        self.engines_bytes = -1  # what the last reading was given
        self.n_read = 0
        self.is_readable = True

    def read(self, engines_bytes: int = 0) -> tuple[Reading, ...]:
        self.engines_bytes = engines_bytes
        self.n_read += 1
        if not self.is_readable:
            raise OSError("no such file")
        words = f"{self.share:.0%} of the control group / are in use"
        return (Reading(PressureSource.GROUP, self.share, words),)
