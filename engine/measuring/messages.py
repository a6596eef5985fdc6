"""What the command and the process that measures say to each other, as JSON."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from engine.types.measurements import MeasureConfig, MeasuredCase


@dataclass(frozen=True, slots=True)
class Task:
    """The cases of a section to measure, from that index on."""

    section: str
    first: int
    config: MeasureConfig
    scratch: Path  # an empty directory, to write in


TASK = TypeAdapter(Task)
NAMES = TypeAdapter(list[str])
"""All cases of the section: the first answer."""
MEASURED = TypeAdapter(MeasuredCase)
"""One case: every answer after that."""
