"""What a copied tail costs the streams beside it: `python -m load_tests.bench.tails`.

Eight rows decode, on the load tests' checkpoint. Beside them a prompt that has been computed before
is asked again, for one token: of 513 tokens it finds sixteen whole blocks, of 511 fifteen, and most
of another one, which is copied before the prompt goes on in it. Either computes one token. Nothing,
the one and the other take turns of some steps each; ratios are medians of those of each round.
"""

import itertools
import statistics
from collections.abc import Iterator
from typing import TypeAlias

import typer
from rich.console import Console

from engine.mlx_backend.cpu.blas import load_blas
from engine.values.settings import EngineConfig
from load_tests.checkpoint import checkpoint
from load_tests.conditions import observe
from load_tests.report import Table
from measuring.engine_step import EngineHarness

ROWS, CONTEXT_TOKENS = 8, 256
STEPS = 6
"""Of a round: the prompt's one, and some until the next comes."""
WHOLE_TOKENS, TAIL_TOKENS = 513, 511
ROW_TOKENS = 2048  # at most, with what it says

Round: TypeAlias = tuple[float, float, float]
"""Seconds beside nothing, beside whole blocks, and beside a tail."""


def rounds(engine: EngineHarness) -> Iterator[Round]:
    """Raises RuntimeError where a tail is not copied, or another block is."""
    whole, tail = (engine.unique_prompt(n) for n in (WHOLE_TOKENS, TAIL_TOKENS))
    for prompt in (whole, tail):
        engine.wait_for({engine.submit(prompt, 1)})
    engine.run(STEPS)
    while True:
        yield engine.run(STEPS), _beside(engine, whole, 0), _beside(engine, tail, 1)


def _beside(engine: EngineHarness, prompt: tuple[int, ...], copies: int) -> float:
    before = engine.copied_blocks()
    name = engine.submit(prompt, 1)
    seconds = engine.run(STEPS)
    engine.wait_for({name})
    if engine.copied_blocks() != before + copies:
        raise RuntimeError(f"a prompt of {len(prompt)} tokens has copied other than {copies}")
    return seconds


def table(taken: list[Round]) -> Table:
    columns = ("beside eight rows", f"{STEPS} steps, ms", "times nothing", "times whole blocks")
    rows = []
    for at, name in enumerate(("nothing", "a prompt in whole blocks", "a prompt with a tail")):
        milliseconds = 1e3 * statistics.median(one[at] for one in taken)
        ratios = (statistics.median(one[at] / one[base] for one in taken) for base in (0, 1))
        rows.append((name, f"{milliseconds:.1f}", *(f"{ratio:.3f}" for ratio in ratios)))
    return Table(columns, tuple(rows))


def main(n_rounds: int = 40) -> None:
    """Measure rounds, of which the first three are not counted."""
    conditions = observe(0, (), load_blas().name or "the system's")
    engine = EngineHarness(EngineConfig(str(checkpoint())), ROWS + 1, ROW_TOKENS)
    engine.begin(ROWS, CONTEXT_TOKENS)
    taken = list(itertools.islice(rounds(engine), 3, 3 + n_rounds))
    console = Console(width=100)
    console.print(table(taken).rich())
    for line in conditions.lines():
        console.print(line, highlight=False)


if __name__ == "__main__":
    typer.run(main)
