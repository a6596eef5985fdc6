"""How short of memory the machine is, as its sources say. Frozen values."""

from dataclasses import dataclass
from enum import StrEnum


class PressureSource(StrEnum):
    """Who says how short of memory the machine is, and what the share is a share of."""

    SYSTEM = "system"  # macOS's own level: normal 0, warning 0.5, critical 1
    MACHINE = "machine"  # memory and swap of a Linux machine: in use, cached files aside
    GROUP = "group"  # of the control group with least left: its limit in use, cached files aside
    STALLS = "stalls"  # of the time since the last reading: all running tasks waited for memory
    GROUP_STALLS = "group_stalls"  # of that time: all of this process's control group waited for it
    KILLS = "kills"  # 1: the kernel has ended a process of a group since the last reading; else 0
    FOOTPRINT = "footprint"  # of the memory of a Mac: what the processes of the daemon take
    BUFFERS = "buffers"  # of the buffers that Metal allows a process: those that an engine keeps


@dataclass(frozen=True, slots=True)
class Reading:
    """What one source says at one moment. `words` is a clause with the figures, and with the limit
    that they are compared with.
    """

    source: PressureSource
    share: float
    words: str
