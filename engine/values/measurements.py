"""What `rootstock doctor --measure` has found. Frozen values, made to be sent to somebody: no path,
no name of a user, a host or a model, and no text of a prompt is in them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from engine.values.settings import EngineConfig

Figures: TypeAlias = Mapping[str, float | int | str]
"""By name. A name ends in its unit: `_ms`, `_mib`, `_gib`; `_times` is a ratio."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    contexts: tuple[int, ...] = (1024, 4096, 16_384)  # tokens of a row whose attention is measured
    rows: tuple[int, ...] = (1, 4, 8)
    rounds: int = 9  # of which medians are taken, at most
    case_seconds: float = 4.0  # of rounds, behind the first ones
    step_contexts: tuple[int, ...] = (256, 2048)  # tokens of a row that is decoded
    prompt_tokens: int = 8192  # of the prompt whose memory is measured
    pool_bytes: int = 64 << 20  # of the arena whose donation is measured, one layer's K or V
    architectures: tuple[str, ...] = ()  # to check; all, where none is named


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
    """All sections. `seconds`: from the start to the end."""

    sections: tuple[Section, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasureConfig:
    """What to measure, and in how many seconds."""

    engine: EngineConfig
    sizes: Sizes = Sizes()
    seconds: float = 570.0  # ten minutes, less what the command takes besides
