"""How much is measured, and how often."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

LEAST_ROUNDS = 3

Figures: TypeAlias = Mapping[str, float | int | str]
"""The figures of a case by name. Names end in a unit: `_ms`, `_mib`, `_gib`, `_times` (a ratio)."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    contexts: tuple[int, ...] = (1024, 4096, 16_384)  # tokens of a row whose attention is measured
    rows: tuple[int, ...] = (1, 4, 8)
    rounds: int = 9  # of which medians are taken, at most
    case_seconds: float = 4.0  # of rounds, after the first ones
    step_contexts: tuple[int, ...] = (256, 2048)  # tokens of a row that is decoded
    prompt_tokens: int = 8192  # of the prompt whose memory is measured
    pool_bytes: int = 64 << 20  # of the arena whose donation is measured, one layer's K or V
    architectures: tuple[str, ...] = ()  # to check; all, where none is named


def rounds(
    most: int, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Iterator[int]:
    """Count rounds: no more than `most`, and after LEAST_ROUNDS none is begun once `seconds` have
    passed.
    """
    end = clock() + seconds
    for done in range(most):
        if done >= LEAST_ROUNDS and clock() > end:
            return
        yield done
