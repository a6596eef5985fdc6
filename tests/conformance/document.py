"""docs/architectures.md: what the run has found."""

import platform
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from tests.conformance.cases import CASES
from tests.conformance.outcome import Outcome, Verdict
from tests.golden.driving import NEAR_TIE

PATH = Path(__file__).parents[2] / "docs" / "architectures.md"

_TEXT = """\
# Architectures

<!-- Written by `make conformance`. -->

mlx-lm {mlx_lm} has {total} architectures: **{served} served, {refused} refused** at load, with the
reason below.

Each was served as a tiny random checkpoint in float32 by the daemon's own loader, scheduler, store
and runner: ragged prompts side by side, cold and warm, their next turns, a shared prefix with
different ends, two choices of one prompt, preemption. Every token said was the best of mlx-lm's own
logits after those before it (or within {near_tie:g} of the best), and `cached_tokens` what it had
to be. The error is that of a token's logits against mlx-lm's own caches, relative to their size, at
most. "Compiled decode" is "yes" where steps of decodes alone run as a compiled graph, and otherwise
has the reason why they do not.

Made by `make conformance` with mlx {mlx} and mlx-lm {mlx_lm} on the {device} of {system}. The words
are explained in [internals](internals/attention-and-decode.md#kinds-of-caches); windows and chunks
are as small as the tiny configs have them.

{architectures}
{metal}
## Other checkpoints

Quantized by `mlx_lm.convert`, or of the same module with other kinds of layers.

{variants}"""
_HEADER = """\
| architecture | layers keep | batches | served | error | compiled decode |
| --- | --- | --- | --- | --- | --- |
"""
_ROW = re.compile(r"^\| ([^|]+) \| [^|]* \| [^|]* \| (yes|refused|wrong)\b", re.MULTILINE)


def render(outcomes: Sequence[Outcome]) -> str:
    """The whole document, of a run of everything."""
    plain = architectures(outcomes)
    verdicts = [outcome.verdict for outcome in plain]
    return _TEXT.format(
        mlx=version("mlx"),
        mlx_lm=version("mlx-lm"),
        total=len(plain),
        served=verdicts.count(Verdict.SERVED),
        refused=verdicts.count(Verdict.REFUSED),
        near_tie=NEAR_TIE,
        device="CPU" if mx.default_device() == mx.cpu else "GPU",
        system=f"{platform.system()} {platform.machine()}",
        architectures=_table(plain),
        metal=_metal(plain),
        variants=_table(outcome for outcome in outcomes if outcome not in plain),
    )


def architectures(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that stand for an architecture, one for each."""
    return [outcome for outcome in outcomes if not CASES[outcome.name].is_variant]


def served_column(document: str) -> dict[str, bool]:
    """Whether each checkpoint is served, by its name in the tables."""
    return {name: cell == "yes" for name, cell in _ROW.findall(document)}


def _table(outcomes: Iterable[Outcome]) -> str:
    return _HEADER + "".join(_row(outcome) for outcome in outcomes)


def _row(outcome: Outcome) -> str:
    served, error = "yes", f"{outcome.error:.0e}" if outcome.error else "0"
    if outcome.verdict is not Verdict.SERVED:
        served, error = f"{outcome.verdict}: {_clause(outcome.reason)}", ""
    compiled = _clause(outcome.compiled)
    cells = (outcome.name, outcome.keeps, outcome.batching, served, error, compiled)
    return f"| {' | '.join(map(_escaped, cells))} |\n"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def _clause(reason: str) -> str:
    """The beginning of a reason that fits a cell: what failed, and the first words of the cause."""
    first = re.split(r"; | \(", reason)[0]
    return ": ".join(first.split(": ")[:2])


def _metal(outcomes: Iterable[Outcome]) -> str:
    names = [f"`{outcome.name}`" for outcome in outcomes if outcome.wants_metal]
    if not names:
        return ""
    return (
        f"{' and '.join(names)} cannot be run on the machine that made this: their modules are "
        "written as Metal kernels, which only Apple's GPUs run.\n"
    )
