"""Plants faults in the source and sees which of them no test notices.

`python -m tests.mutants reach DIRECTORY` finds which tests reach which lines (once, a quarter of an
hour); `run DIRECTORY RESULTS` tries a sample of mutants, about two seconds each;
`compare BEFORE AFTER` shows what one suite notices and another does not.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tests.mutants import children, reach
from tests.mutants.draw import PACKAGES, Mutant, draw
from tests.mutants.trial import Result, trials

PARTS = ("unit", "property", "golden", "simulation", "contract", "conformance", "hostile")

app = typer.Typer(help=__doc__)
Directory = Annotated[Path, typer.Argument(help="Holds which tests reach which lines.")]
Tree = Annotated[Path, typer.Option(help="The checkout whose source and tests are meant.")]


@app.command(name="reach")
def find_reach(
    directory: Directory,
    parts: Annotated[list[str] | None, typer.Option("--part", help="Of tests/.")] = None,
    tree: Tree = Path(),
) -> None:
    """Run the fast tests once, noting what each reaches."""
    children.import_libraries()
    for part in parts or PARTS:
        code = reach.measure(tree.resolve(), f"tests/{part}", directory.resolve(), 3600.0)
        print(f"{part}: exit code {code}", flush=True)
    for package, percent in reach.branch_coverage(tree.resolve(), directory.resolve()).items():
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
    package: Annotated[str, typer.Option(help="Only mutants of this package.")] = "",
    tests: Annotated[int, typer.Option(help="At most so many for a mutant.")] = 40,
    seconds: Annotated[float, typer.Option(help="Tests of so many in all for a mutant.")] = 15.0,
    tree: Tree = Path(),
) -> None:
    """Try mutants, each with the tests that reach it, until one fails."""
    tree = tree.resolve()
    killers = {
        mutant: result.killer
        for mutant, result in (load(again) if again else {}).items()
        if result.killed
    }
    done = load(results) if results.exists() else {}
    wanted = [mutant for mutant in killers or draw(tree, mutants, seed) if mutant not in done]
    reached = reach.read(tree, directory)
    children.import_libraries()
    with trials(tree, reached) as laboratory, results.open("a") as lines:
        for mutant in wanted:
            if package in ("", mutant.package):
                first = killers.get(mutant, "").removesuffix(" timed out")
                result = laboratory.run(mutant, first, tests, seconds)
                print(json.dumps(asdict(mutant) | asdict(result)), file=lines, flush=True)
    report(load(results))


@app.command()
def check(directory: Directory, results: Path, tree: Tree = Path()) -> None:
    """Name the tests that killed mutants and fail without any: their verdicts mean nothing."""
    tree = tree.resolve()
    killers = {result.killer for result in load(results).values() if result.killed}
    children.import_libraries()
    with trials(tree, reach.read(tree, directory)) as laboratory:
        for test in sorted({killer.removesuffix(" timed out") for killer in killers}):
            if "::" in test and laboratory.fails_unchanged(test):
                print(test)


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
