"""The report of `rootstock doctor --measure`, and what the command and the process that measures
send to each other, as JSON. A report can be sent to anybody: it has no path, no name of a user, a
host or a model, and no text of a prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from engine.measuring.rounds import Figures, Sizes
from engine.values.settings import EngineConfig


@dataclass(frozen=True, slots=True)
class MeasuredCase:
    """The figures of one case, or why there are none."""

    case: str
    figures: Figures
    seconds: float  # that it took in all
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """The cases of one measurement, in the order in which they were measured."""

    name: str
    about: str  # what the figures mean
    cases: tuple[MeasuredCase, ...]
    seconds: float
    cut: str = ""  # why not all of it was measured; "" where all was


@dataclass(frozen=True, slots=True)
class Measurements:
    """The report: all sections, and the seconds from the start to the end."""

    sections: tuple[Section, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasureConfig:
    """What to measure, and in how many seconds."""

    engine: EngineConfig
    sizes: Sizes = field(default_factory=Sizes)
    seconds: float = 570.0  # ten minutes, less what the command takes besides


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
