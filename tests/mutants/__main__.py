"""Plants faults in the source and sees which of them no test notices.

`python -m tests.mutants reach DIRECTORY` finds which tests reach which lines (once, a quarter of an
hour); `run DIRECTORY RESULTS` tries a sample of mutants, about two seconds each;
`compare BEFORE AFTER` shows what one suite notices and another does not.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import pytest
import typer

from tests.mutants import reach
from tests.mutants.draw import PACKAGES, Mutant, draw, sites
from tests.mutants.trial import Result, Trial, Trials

PARTS = [
    f"tests/{part}"
    for part in ("unit", "property", "golden", "simulation", "contract", "conformance", "hostile")
]

app = typer.Typer(help=__doc__)
Directory = Annotated[Path, typer.Argument(help="Holds which tests reach which lines.")]
Parts = Annotated[list[str], typer.Option("--part", help="Files and folders of tests.")]
Tree = Annotated[Path, typer.Option(help="The checkout whose source and tests are meant.")]


@app.command(name="reach")
def find_reach(directory: Directory, parts: Parts = PARTS, tree: Tree = Path()) -> None:
    """Run the fast tests once, noting what each reaches."""
    directory = directory.resolve()
    _enter(tree)
    for package, percent in reach.measure(parts, directory).items():
        print(f"{package}: {percent:.1f} % of lines and branches")


@app.command()
def run(
    directory: Directory,
    results: Annotated[Path, typer.Argument(help="JSON lines are added, none twice.")],
    mutants: Annotated[int, typer.Option(help="How many to draw.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    again: Annotated[
        Path | None, typer.Option(help="Results: try those that were killed, instead of drawing.")
    ] = None,
    tests: Annotated[int, typer.Option(help="At most so many for a mutant.")] = 40,
    seconds: Annotated[float, typer.Option(help="Tests of so many in all for a mutant.")] = 15.0,
    processes: Annotated[int, typer.Option(help="How many mutants are tried at a time.")] = 1,
    parts: Parts = PARTS,
    tree: Tree = Path(),
) -> None:
    """Try mutants, each with the tests that reach it, until one fails."""
    reached = reach.read(directory)
    results = results.resolve()
    done = load(results) if results.exists() else {}
    old = {} if again is None else load(again)
    _enter(tree)
    killers = {mutant: result.killer for mutant, result in old.items() if result.killed}
    wanted = [mutant for mutant in killers or draw(Path(), mutants, seed) if mutant not in done]

    def trials() -> Iterator[Trial]:
        for mutant in wanted:
            path = Path(mutant.file)
            site = sites(mutant.file, path.read_bytes()).get(mutant) if path.exists() else None
            chosen = reached.tests(mutant.file, site.lines, tests, seconds) if site else []
            if (killer := killers.get(mutant)) in reached.seconds:
                chosen = [killer, *(test for test in chosen if test != killer)]
            yield Trial(mutant, site.source if site else None, chosen)

    with results.open("a") as lines:

        def note(mutant: Mutant, result: Result) -> None:
            print(json.dumps(asdict(mutant) | asdict(result)), file=lines, flush=True)

        plugin = Trials(trials(), reached, processes, note)
        pytest.main([*parts, *reach.OPTIONS, "-x", "-s", "--tb=no"], plugins=[plugin])
    report(load(results))


@app.command()
def compare(before: Path, after: Path) -> None:
    """List the mutants that were killed before and are not after. Fails if there are any."""
    old, new = load(before), load(after)
    report({mutant: old[mutant] for mutant in old if mutant in new})
    report(new)
    lost = [
        mutant for mutant, result in new.items() if old[mutant].killed and result.killed is False
    ]
    for mutant in lost:
        print(f"{mutant.file}: {mutant.text} ({mutant.operator}), by {old[mutant].killer}")
    raise typer.Exit(bool(lost))


def _enter(tree: Path) -> None:
    """Import the project from `tree` from here on. Random tests repeat their examples, as in CI."""
    tree = tree.resolve()
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "HYPOTHESIS_PROFILE": "fast", "CI": "1"}
    sys.path[:] = [str(tree), *(path for path in sys.path if not (Path(path) / "kvstore").is_dir())]
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]


def load(path: Path) -> dict[Mutant, Result]:
    found = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        mutant = Mutant(*(row.pop(field) for field in ("file", "text", "operator", "occurrence")))
        found[mutant] = Result(**row)
    return found


def report(results: dict[Mutant, Result]) -> None:
    for package in PACKAGES:
        of_package = [result for mutant, result in results.items() if mutant.package == package]
        killed = sum(result.killed is True for result in of_package)
        gone = sum(result.killed is None for result in of_package)
        unreached = sum(result.killed is False and not result.n_tests for result in of_package)
        print(
            f"{package}: {len(of_package)} mutants, {killed} killed, {unreached} that no test "
            f"reaches, {gone} of lines that are gone"
        )


if __name__ == "__main__":
    app()
