"""The report of `rootstock doctor --measure`, and what its processes send each other as JSON.

A report can be sent to anybody: it has no path, no name of a user, a host or a model, and no text
of a prompt. This module imports no MLX.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from pydantic import TypeAdapter

from engine.values.settings import EngineConfig

LEAST_ROUNDS = 3

Figures: TypeAlias = Mapping[str, float | int | str]
"""The figures of a case by name. Names end in a unit: `_ms`, `_mib`, `_gib`, `_times` (a ratio)."""

Cases: TypeAlias = Mapping[str, Callable[[], Figures]]
"""The cases of a section by name, in order. Each is measured when it is called, and raises whatever
goes wrong.
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. Tests measure less."""

    contexts: tuple[int, ...] = (1024, 4096, 16_384)  # tokens of a row, where attention is measured
    rows: tuple[int, ...] = (1, 4, 8)
    rounds: int = 9  # at most; a case's figures are medians over its rounds
    case_seconds: float = 4.0  # after which no round of a case begins, except the first few
    step_contexts: tuple[int, ...] = (256, 2048)  # tokens of a row, where steps are measured
    prompt_tokens: int = 8192  # of all prompts together, where memory is measured
    pool_bytes: int = 64 << 20  # one layer's K or V, where donation is measured
    architectures: tuple[str, ...] = ()  # whose check at load is measured; empty: all


@dataclass(frozen=True, slots=True)
class MeasureConfig:
    """What to measure, and in how many seconds."""

    engine: EngineConfig
    sizes: Sizes = field(default_factory=Sizes)
    seconds: float = 570.0  # ten minutes, less what the command itself takes


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
    cut: str = ""  # why cases are missing; "" if none are


@dataclass(frozen=True, slots=True)
class Measurements:
    """The report: all sections, and the seconds from the start to the end."""

    sections: tuple[Section, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Task:
    """The cases of a section to measure: those from index `first` on, before index `stop`."""

    section: str
    first: int
    config: MeasureConfig
    scratch: Path  # an empty directory for temporary files
    stop: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)  # environment of its process


TASK = TypeAdapter(Task)
NAMES = TypeAdapter(list[str])
"""The names of all cases of the section: the first answer to a task."""
MEASURED = TypeAdapter(MeasuredCase)
"""One case: every later answer."""


def rounds(
    most: int, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Iterator[int]:
    """Count rounds from 0, at most `most`. Once `seconds` have passed, and LEAST_ROUNDS are done,
    no round begins.
    """
    end = clock() + seconds
    for done in range(most):
        if done >= LEAST_ROUNDS and clock() > end:
            return
        yield done
