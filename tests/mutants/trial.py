"""Runs the tests that reach a mutant against it, in a copy of the tree."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants.children import TIMED_OUT, run_pytest
from tests.mutants.draw import Mutant, sites
from tests.mutants.reach import Reach

TIMEOUT_SECONDS = 60.0
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "docs", "node_modules")


@dataclass(frozen=True)
class Result:
    """`killed` is None if the source no longer has the mutant's line."""

    killed: bool | None
    killer: str  # the test that failed or hung, or the file that could not be imported
    n_tests: int  # 0 if none reaches the line
    seconds: float


class _FirstFailure:
    """Writes each test that starts and the first that fails to a file, for another process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._path.write_text(nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._path.write_text(report.nodeid)


class Trials:
    """Tries mutants in a copy of `tree`. One at a time."""

    def __init__(self, tree: Path, reach: Reach, copy: Path) -> None:
        self._tree, self._reach, self._copy = tree, reach, copy
        self._output = copy.with_suffix(".log")
        self._running = copy.with_suffix(".running")
        self._mtime = 0

    def run(self, mutant: Mutant, first: str, most: int, most_seconds: float) -> Result:
        """`first` is a test that killed the mutant elsewhere, or "": it runs before all others."""
        path = self._tree / mutant.file
        site = sites(mutant.file, path.read_bytes()).get(mutant) if path.exists() else None
        if site is None:
            return Result(None, "", 0, 0.0)
        begun = time.monotonic()
        tests = self._reach.tests(mutant.file, site.lines, most, most_seconds)
        batches = [tests]
        if first in self._reach.seconds:
            batches = [[first], [test for test in tests if test != first]]
        killed, killer = False, ""
        with self._changed(mutant.file, site.source):
            for batch in filter(None, batches):
                killed, killer = self._fails(batch)
                if killed:
                    break
        n_tests = sum(map(len, batches))
        return Result(killed, killer, n_tests, round(time.monotonic() - begun, 2))

    def fails_unchanged(self, test: str) -> bool:
        """Whether a test fails here without any mutant."""
        return self._fails([test])[0]

    def _fails(self, tests: list[str]) -> tuple[bool, str]:
        """Whether one fails, which includes that it hangs or cannot be imported; and which."""
        self._running.write_text("")
        arguments = [*tests, "-x", "--tb=no"]
        recorder = _FirstFailure(self._running)
        code = run_pytest(self._copy, arguments, recorder, TIMEOUT_SECONDS, self._output)
        killer = self._running.read_text()
        if code == TIMED_OUT:
            return True, f"{killer} timed out"
        return code != pytest.ExitCode.OK, killer if code else ""

    @contextmanager
    def _changed(self, file: str, source: bytes) -> Iterator[None]:
        """Each text gets a modification time of its own, by which Python tells what it compiled."""
        path = self._copy / file
        original = path.read_bytes()
        try:
            self._write(path, source)
            yield
        finally:
            self._write(path, original)

    def _write(self, path: Path, source: bytes) -> None:
        path.write_bytes(source)
        self._mtime += 1
        os.utime(path, (self._mtime, self._mtime))


@contextmanager
def trials(tree: Path, reach: Reach) -> Iterator[Trials]:
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copy = Path(directory) / "tree"
        shutil.copytree(tree, copy, ignore=LEFT_OUT)
        yield Trials(tree, reach, copy)
