"""Which tests reach which lines: one run of the fast tests under coverage, kept in a directory."""

import json
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import coverage
import pytest

from tests.mutants.children import run_pytest
from tests.mutants.draw import PACKAGES

FAST = "not slow and not browser"
NEAR = ("tests/unit/", "tests/property/")
N_NEAR_SHARE = 0.75
N_OF_A_FUNCTION = 4


class _Recorder:
    """Has coverage keep apart what each test reaches, and keeps the seconds of those that pass."""

    def __init__(self, measured: coverage.Coverage, seconds_file: Path) -> None:
        self._measured = measured
        self._seconds_file = seconds_file
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._measured.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._measured.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        passed = {test: at for test, at in self._seconds.items() if test not in self._failed}
        self._seconds_file.write_text(json.dumps(passed))


def measure(tree: Path, part: str, directory: Path, timeout_seconds: float) -> int:
    """Run the fast tests of `part`, a file or directory of `tree`. Returns pytest's exit code."""
    directory.mkdir(parents=True, exist_ok=True)
    name = part.replace("/", "_")
    measured = coverage.Coverage(
        data_file=str(directory / f"{name}.coverage"),
        config_file=False,
        branch=True,
        source=[str(tree / start) for start, _ in PACKAGES.values()],
    )

    def around(run: Callable[[], int]) -> int:
        measured.start()
        try:
            return run()
        finally:
            measured.stop()
            measured.save()

    recorder = _Recorder(measured, directory / f"{name}.seconds")
    arguments = [part, "-m", FAST]
    output = directory / f"{name}.log"
    return run_pytest(tree, arguments, recorder, timeout_seconds, output, around)


@dataclass
class Reach:
    """The tests that reach a line, and how long each takes."""

    seconds: dict[str, float]
    tests_of_lines: dict[str, dict[int, set[str]]]  # by file, relative to the tree

    def tests(self, file: str, lines: range, most: int, most_seconds: float) -> list[str]:
        """At most `most` tests that reach one of the lines, or any of the file if there are none.
        Those of unit and property tests come first, and the quickest; few of one function.
        """
        of_lines = self.tests_of_lines.get(file, {})
        found = set[str]().union(*(of_lines.get(line, ()) for line in lines or of_lines))
        found &= self.seconds.keys()
        near = self._quickest({test for test in found if test.startswith(NEAR)})
        far = self._quickest({test for test in found if not test.startswith(NEAR)})
        chosen = list(islice(near, round(most * N_NEAR_SHARE)))
        chosen += islice(far, most - len(chosen))
        chosen += islice(near, most - len(chosen))
        spent = 0.0
        for n_chosen, test in enumerate(chosen):
            spent += self.seconds[test]
            if n_chosen and spent > most_seconds:
                return _by_files(chosen[:n_chosen])
        return _by_files(chosen)

    def _quickest(self, tests: set[str]) -> Iterator[str]:
        of_functions: dict[str, int] = {}
        for test in sorted(tests, key=lambda test: (round(self.seconds[test], 2), test)):
            function = test.partition("[")[0]
            of_functions[function] = of_functions.get(function, 0) + 1
            if of_functions[function] <= N_OF_A_FUNCTION:
                yield test


def _by_files(tests: list[str]) -> list[str]:
    """The same tests, those of a file together, so that its fixtures are made once."""
    files: dict[str, list[str]] = {}
    for test in tests:
        files.setdefault(test.partition("::")[0], []).append(test)
    return [test for of_file in files.values() for test in of_file]


def read(tree: Path, directory: Path) -> Reach:
    reach = Reach({}, {})
    for path in sorted(directory.glob("*.seconds")):
        reach.seconds |= json.loads(path.read_text())
    for path in sorted(directory.glob("*.coverage")):
        data = coverage.CoverageData(str(path))
        data.read()
        for file in data.measured_files():
            of_lines = reach.tests_of_lines.setdefault(str(Path(file).relative_to(tree)), {})
            for line, tests in data.contexts_by_lineno(file).items():
                of_lines.setdefault(line, set()).update(tests)
    return reach


def branch_coverage(tree: Path, directory: Path) -> dict[str, float]:
    """The share of lines and branches of each package that the tests reach, in percent."""
    measured = coverage.Coverage(data_file=str(directory / "all"), config_file=False, branch=True)
    measured.combine([str(path) for path in directory.glob("*.coverage")], keep=True)
    return {
        name: measured.report(include=[str(tree / start / "*")], file=open("/dev/null", "w"))
        for name, (start, _) in PACKAGES.items()
    }
