"""The conformance run: `python -m tests.conformance` for all, or the names of some."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from tests.conformance import document
from tests.conformance.cases import CASES
from tests.conformance.outcome import Outcome, Verdict
from tests.vision_checkpoints import REFUSED_FAMILIES, VISION_FAMILIES

TIMEOUT_SECONDS = 300
LEAST_SERVED = 100
"""Architectures, of a run of all."""

_STYLES = {Verdict.SERVED: "green", Verdict.REFUSED: "yellow", Verdict.WRONG: "bold red"}


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Checkpoints, and families that take images; all by default."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=2, help="Processes side by side.")] = 2,
) -> None:
    """Serve tiny checkpoints of mlx-lm's architectures and compare them with mlx-lm.

    A run of all writes docs/architectures.md, and scores the trained model; see demo.py. The exit
    status is 1 if one is served wrong, and of a run of all if too few are served or others than the
    document had said, or if the trained model answers otherwise than through mlx-lm.
    """
    families = [*VISION_FAMILIES, *REFUSED_FAMILIES]
    if unknown := set(names or ()) - {*CASES, *families}:
        raise typer.BadParameter(f"no such checkpoint: {', '.join(sorted(unknown))}")
    console = Console()
    outcomes = _run([name for name in names or CASES if name in CASES], jobs, console)
    images = _run([name for name in names or families if name in families], jobs, console, "images")
    problems = [f"{each.name} is wrong" for each in outcomes if each.verdict is Verdict.WRONG]
    problems += [
        f"{each.name} with images is {each.verdict}"
        for each in images
        if (each.verdict is Verdict.REFUSED) is not (each.name in REFUSED_FAMILIES)
        or each.verdict is Verdict.WRONG
    ]
    if not names:
        problems += _publish(outcomes, images)
        if subprocess.run([sys.executable, "-m", "tests.conformance.demo"], check=False).returncode:
            problems.append("the trained model does not answer as through mlx-lm")
    for problem in problems:
        console.print(f"[bold red]{escape(problem)}")
    raise typer.Exit(bool(problems))


def _run(names: Sequence[str], jobs: int, console: Console, module: str = "trial") -> list[Outcome]:
    """Outcomes in the order of the names, of this module of the package."""
    outcomes = {}
    with Progress(console=console) as progress:
        task = progress.add_task("serving", total=len(names))
        for outcome in _outcomes(names, jobs, module):
            outcomes[outcome.name] = outcome
            progress.console.print(_line(outcome), soft_wrap=True)
            progress.advance(task)
    return [outcomes[name] for name in names]


def _outcomes(names: Sequence[str], jobs: int, module: str) -> Iterator[Outcome]:
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(_in_own_process, name, module) for name in names]):
            yield future.result()


def _in_own_process(name: str, module: str) -> Outcome:
    """An architecture's module may exit, crash or hang; that is an outcome, too."""
    try:
        with tempfile.TemporaryDirectory() as parent:
            done = subprocess.run(
                [sys.executable, "-m", f"tests.conformance.{module}", name, parent],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
                check=True,
            )
        return TypeAdapter(Outcome).validate_json(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Outcome(name, Verdict.WRONG, reason=f"not done after {TIMEOUT_SECONDS} seconds")
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().rpartition("\n")[2]
        return Outcome(name, Verdict.WRONG, reason=f"exit status {error.returncode}: {last}")
    except (IndexError, ValidationError):
        return Outcome(name, Verdict.WRONG, reason="its process ended without an outcome")


def _line(outcome: Outcome) -> str:
    style = _STYLES[outcome.verdict]
    how = [outcome.keeps, outcome.batching, f"{outcome.error:.0e}", outcome.reason]
    said = "; ".join(filter(None, how if outcome.batching else [outcome.reason]))
    return f"[{style}]{outcome.verdict:8}[/] {escape(f'{outcome.name}: {said}')}"


def _publish(outcomes: Sequence[Outcome], images: Sequence[Outcome]) -> list[str]:
    """Write the document; returns what a reader of the old one must be told."""
    old = document.PATH.read_text(encoding="utf-8") if document.PATH.exists() else ""
    new = document.render(outcomes, images)
    document.PATH.write_text(new, encoding="utf-8")
    problems = []
    served = sum(each.verdict is Verdict.SERVED for each in document.architectures(outcomes))
    if served < LEAST_SERVED:
        problems.append(f"{served} architectures are served, fewer than {LEAST_SERVED}")
    before, after = document.served_column(old), document.served_column(new)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    if old and changed:
        problems.append(f"{document.PATH.name} has changed: {', '.join(sorted(changed))}")
    return problems


if __name__ == "__main__":
    typer.run(main)
