"""What recurrent states in half precision gain: `python -m load_tests.bench.state_formats`.

Prompts are asked for in turn, more than the saved states of the first format suffice for: the share
of their tokens that was found, and the time for all.
"""

from dataclasses import replace

import typer
from rich.console import Console

from engine.mlx_backend.blas import load_blas
from engine.values.settings import EngineConfig, StateFormat
from load_tests.bench.kv_formats import ask_in_turn
from load_tests.checkpoint import checkpoint
from load_tests.conditions import observe
from load_tests.report import Table
from measuring.engine_step import EngineHarness


def main(
    prompts: int = 4, prompt_tokens: int = 1100, turns: int = 3, state_cache_mib: int = 10
) -> None:
    """Measure each format with saved states of equal bytes, on a checkpoint of the shape hybrid."""
    conditions = observe(0, (), load_blas().name or "the system's")
    config, console = EngineConfig(str(checkpoint("hybrid"))), Console(width=110)
    config = replace(config, state_cache_bytes=state_cache_mib << 20)
    lines = []
    for format in (StateFormat.FULL, StateFormat.F16, StateFormat.BF16):
        engine = EngineHarness(replace(config, state_format=format), 1, 2 * prompts * prompt_tokens)
        seconds = ask_in_turn(engine, prompts, prompt_tokens, turns)
        divergence = engine.card.state_divergence
        told = "" if divergence is None else f"{divergence:.2g}"
        lines.append((format, told, f"{engine.hit_share():.0%}", f"{seconds:.1f}"))
    time_of_all = f"{prompts} prompts of {prompt_tokens:,}, {turns} times: s"
    table = Table(("saved states", "KL", "found", time_of_all), tuple(lines))
    console.print(table.rich())
    for line in conditions.lines():
        console.print(line, highlight=False)


if __name__ == "__main__":
    typer.run(main)
