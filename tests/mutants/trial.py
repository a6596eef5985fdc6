"""Runs the tests that reach a mutant against it.

Pytest collects all tests once. For each mutant a forked process gives the functions of the mutant's
file the changed code, and runs the tests. Processes that the tests start run the code as it is.
"""

import gc
import os
import resource
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import NoReturn, TypeAlias

import _pytest.main
import pytest

from tests.mutants.draw import Mutant
from tests.mutants.reach import Reach

START_SECONDS = 30.0
MOST_SECONDS = 60.0
SLOWER = 2.0
"""A test hangs after this many times its duration under coverage, plus START_SECONDS."""
POLL_SECONDS = 0.01
MEMORY_BYTES = 6 << 30


@dataclass(frozen=True)
class Result:
    """`killed` is None if the source no longer has the mutant's line."""

    killed: bool | None
    killer: str  # the test that failed or hung
    hangs: bool
    n_tests: int  # 0 if none reaches the line
    seconds: float


@dataclass(frozen=True)
class Trial:
    """A mutant, its file's text (None if that lacks the mutant's line), and the tests to run."""

    mutant: Mutant
    source: bytes | None
    tests: list[str]


class Trials:
    """A plugin of pytest: runs trials in place of the tests that were collected."""

    def __init__(
        self,
        trials: Iterable[Trial],
        reach: Reach,
        n_processes: int,
        report: Callable[[Mutant, Result], None],
    ) -> None:
        self._trials, self._reach, self._report = trials, reach, report
        self._n_processes = n_processes

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        functions = _functions(session.config.rootpath)
        running: list[_Running] = []
        for trial in self._trials:
            tests = [test for test in trial.tests if test in items]
            if trial.source is None or not tests:
                killed = None if trial.source is None else False
                self._report(trial.mutant, Result(killed, "", False, 0, 0.0))
                continue
            while len(running) >= self._n_processes:
                running = self._going_on(running)
            seconds = sum(self._reach.seconds[test] for test in tests)
            timeout = min(START_SECONDS + SLOWER * seconds, MOST_SECONDS)
            process = _Running(trial.mutant, len(tests), timeout)
            if process.is_child:
                _change(functions[trial.mutant.file], trial.source)
                session.items = [items[test] for test in tests]
                process.run(session)
            running.append(process)
        while running:
            running = self._going_on(running)
        return True

    def _going_on(self, running: list["_Running"]) -> list["_Running"]:
        """Report the processes that have ended. Returns the others."""
        time.sleep(POLL_SECONDS)
        going_on = []
        for process in running:
            result = process.result()
            if result is None:
                going_on.append(process)
            else:
                self._report(process.mutant, result)
        return going_on


class _Running:
    """A forked process that runs tests on a mutant, as both processes see it."""

    def __init__(self, mutant: Mutant, n_tests: int, timeout_seconds: float) -> None:
        self.mutant = mutant
        self._n_tests = n_tests
        self._begun = time.monotonic()
        self._deadline = self._begun + timeout_seconds
        self._directory = Path(tempfile.mkdtemp(prefix="m"))
        self._current = self._directory / "test"
        self._pid = os.fork()

    @property
    def is_child(self) -> bool:
        return self._pid == 0

    def result(self) -> Result | None:
        """None while it runs. A test that hangs has failed."""
        ended, status = os.waitpid(self._pid, os.WNOHANG)
        hangs = not ended and time.monotonic() > self._deadline
        if not ended and not hangs:
            return None
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)  # what the tests started and left, too
        if hangs:
            os.waitpid(self._pid, 0)
        killed = hangs or os.waitstatus_to_exitcode(status) != 0
        killer = self._current.read_text() if killed and self._current.exists() else ""
        shutil.rmtree(self._directory, ignore_errors=True)
        seconds = round(time.monotonic() - self._begun, 2)
        return Result(killed, killer, hangs, self._n_tests, seconds)

    def run(self, session: pytest.Session) -> NoReturn:
        """Run the session's tests up to the first that fails, and exit."""
        failed = True
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(1, 2)
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
            os.environ["TMPDIR"] = tempfile.tempdir = str(self._directory)
            session.config.pluginmanager.register(self)
            with suppress(session.Failed):
                _pytest.main.pytest_runtestloop(session)
            failed = session.testsfailed > 0
        finally:
            os._exit(failed)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._current.write_text(nodeid)


_Functions: TypeAlias = dict[str, list[FunctionType]]


def _functions(tree: Path) -> _Functions:
    """All functions that exist, by the file in which they are written, relative to `tree`."""
    gc.unfreeze()
    found: _Functions = {}
    for function in gc.get_objects():
        if isinstance(function, FunctionType):
            path = Path(function.__code__.co_filename)
            if path.is_relative_to(tree):
                found.setdefault(str(path.relative_to(tree)), []).append(function)
    gc.freeze()
    return found


def _change(functions: list[FunctionType], source: bytes) -> None:
    """Give functions the code that `source`, the text of their file, has where they are written.

    A function whose change uses no longer the same variables around it stays as it is.
    """
    filename = functions[0].__code__.co_filename
    codes = list(_codes_within(compile(source, filename, "exec", dont_inherit=True)))
    n_of_place = Counter(map(_place, codes))
    of_place = {_place(code): code for code in codes}
    for function in functions:
        place = _place(function.__code__)
        if n_of_place[place] != 1:  # of two lambdas of a line neither is known from the other
            continue
        if of_place[place].co_freevars == function.__code__.co_freevars:
            function.__code__ = of_place[place]


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _codes_within(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes_within(constant)
