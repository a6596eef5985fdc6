"""Which tests reach which lines: one run of the fast tests under coverage, kept in a directory."""

import io
import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import coverage
import pytest

from tests.mutants.draw import PACKAGES

OPTIONS = ("-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow and not browser")
NEAR = ("tests/unit/", "tests/property/")
N_NEAR_SHARE = 0.75
SHARE_OF_A_FUNCTION = 0.1


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


def measure(paths: Sequence[str], directory: Path) -> dict[str, float]:
    """Run the fast tests at `paths` in the working directory, and keep in `directory` what they
    reach. Returns the percentage of lines and branches that they reach, by package.
    """
    directory.mkdir(parents=True, exist_ok=True)
    name = paths[0].replace("/", "_")
    measured = coverage.Coverage(
        data_file=str(directory / f"{name}.coverage"),
        config_file=False,
        branch=True,
        source=[start for start, _ in PACKAGES.values()],
    )
    measured.set_option("run:relative_files", True)
    measured.erase()
    with measured.collect():
        recorder = _Recorder(measured, directory / f"{name}.seconds")
        pytest.main([*paths, *OPTIONS], plugins=[recorder])
    measured.save()
    return {
        package: measured.report(include=[f"{start}*"], file=io.StringIO())
        for package, (start, _) in PACKAGES.items()
    }


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
        n_of_a_function = max(round(most * SHARE_OF_A_FUNCTION), 1)
        near = self._quickest({test for test in found if test.startswith(NEAR)}, n_of_a_function)
        far = self._quickest({test for test in found if not test.startswith(NEAR)}, n_of_a_function)
        chosen = list(islice(near, round(most * N_NEAR_SHARE)))
        chosen += islice(far, most - len(chosen))
        chosen += islice(near, most - len(chosen))
        spent = 0.0
        for n_chosen, test in enumerate(chosen):
            spent += self.seconds[test]
            if n_chosen and spent > most_seconds:
                return _by_files(chosen[:n_chosen])
        return _by_files(chosen)

    def _quickest(self, tests: set[str], n_of_a_function: int) -> Iterator[str]:
        of_functions: dict[str, int] = {}
        for test in sorted(tests, key=lambda test: (round(self.seconds[test], 2), test)):
            function = test.partition("[")[0]
            of_functions[function] = of_functions.get(function, 0) + 1
            if of_functions[function] <= n_of_a_function:
                yield test


def _by_files(tests: list[str]) -> list[str]:
    """The tests, grouped by file, so that each file's fixtures are made once."""
    files: dict[str, list[str]] = {}
    for test in tests:
        files.setdefault(test.partition("::")[0], []).append(test)
    return [test for of_file in files.values() for test in of_file]


def read(directory: Path) -> Reach:
    """What runs of `measure` have kept in `directory`."""
    reach = Reach({}, {})
    for path in sorted(directory.glob("*.seconds")):  # written at the end: those of whole runs
        reach.seconds |= json.loads(path.read_text())
        data = coverage.CoverageData(str(path.with_suffix(".coverage")))
        data.read()
        for file in data.measured_files():
            of_lines = reach.tests_of_lines.setdefault(file, {})
            for line, tests in data.contexts_by_lineno(file).items():
                of_lines.setdefault(line, set()).update(tests)
    return reach
