"""What the command and the process that measures say to each other, as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from engine.values.measurements import MeasureConfig, MeasuredCase


@dataclass(frozen=True, slots=True)
class Task:
    """The cases of a section to measure: those from index `first` on, before index `stop`."""

    section: str
    first: int
    config: MeasureConfig
    scratch: Path  # an empty directory, to write in
    stop: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)  # the environment of its process


TASK = TypeAdapter(Task)
NAMES = TypeAdapter(list[str])
"""All cases of the section: the first answer."""
MEASURED = TypeAdapter(MeasuredCase)
"""One case: every answer after that."""
