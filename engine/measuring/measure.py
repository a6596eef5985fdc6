"""The server's door: measures section after section, within a time. Imports no MLX."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.api import Report
from engine.measuring.messages import (
    MEASURED,
    NAMES,
    MeasureConfig,
    MeasuredCase,
    Measurements,
    Section,
    Task,
)
from engine.measuring.plan import SECTIONS, SectionPlan
from engine.measuring.process import Answers, MeasuringProcess, Start
from engine.measuring.shares import Clock, Shares


def measure(
    config: MeasureConfig,
    report: Report,
    start: Start = MeasuringProcess,
    clock: Clock = time.monotonic,
) -> Measurements:
    """Measure all sections, each in processes of its own. Returns within `config.seconds`.

    A section that would take longer than its share is cut short; with the time that others leave it
    goes on. What ends a process costs the case that it was at. Ctrl-C ends all.
    """
    began = clock()
    with tempfile.TemporaryDirectory(prefix="rootstock-") as scratch:
        tasks = [Task(plan.name, 0, config, Path(scratch)) for plan in SECTIONS]
        runs = [SectionRun(*each, start, clock) for each in zip(SECTIONS, tasks, strict=True)]
        try:
            _measure(runs, began + config.seconds, report, clock)
        except KeyboardInterrupt:
            for run in runs:
                run.stop()
    return Measurements(tuple(run.section() for run in runs), clock() - began)


def _measure(runs: Sequence["SectionRun"], end: float, report: Report, clock: Clock) -> None:
    """All of them, then once more those that had no time for all of their cases."""
    _share_out(runs, end, report, clock)
    _share_out([run for run in runs if run.wants_time], end, report, clock)


def _share_out(runs: Sequence["SectionRun"], end: float, report: Report, clock: Clock) -> None:
    shares = Shares(end, [run.plan.weight for run in runs], clock)
    for run in runs:
        until = shares.next_end()
        if (most := until - clock()) > 0:
            report(f"{run.in_words}, at most {most:.0f} s")
            run.go_on(until)


class SectionRun:
    """One section: what has been measured of it, and how it goes on."""

    def __init__(self, plan: SectionPlan, task: Task, start: Start, clock: Clock) -> None:
        self.plan = plan
        self._task = task
        self._start = start
        self._clock = clock
        self._names: list[str] | None = None  # until a process has said them
        self._cases = list[MeasuredCase]()
        self._seconds = 0.0
        self._cut = "no time was left"

    @property
    def wants_time(self) -> bool:
        """Whether there are cases that a longer time would have sufficed for."""
        return self._names is None or self._done < len(self._names)

    @property
    def in_words(self) -> str:
        return f"{self.plan.name}, from case {self._done + 1} on" if self._done else self.plan.name

    def section(self) -> Section:
        plan = self.plan
        return Section(plan.name, plan.about, tuple(self._cases), self._seconds, self._cut)

    def stop(self) -> None:
        """It does not go on."""
        self._cut = self._cut and "stopped by hand"

    def go_on(self, until: float) -> None:
        """Measure case after case, until that time by the clock."""
        started = self._clock()
        try:
            self._cut = self._cut_at(until)
        finally:
            self._seconds += self._clock() - started

    @property
    def _done(self) -> int:
        return len(self._cases)

    def _cut_at(self, until: float) -> str:
        """Measure; why not all is measured, or ""."""
        while self._names is None or self._done < len(self._names):
            task = self._next_task()
            answers = self._start(task)
            try:
                if not self._take(answers, until, task.stop):
                    return self._out_of_time()
            except EOFError:
                ended = answers.how_it_ended() or "its process ended early"
                if self._names is None:
                    return ended
                self._cases.append(MeasuredCase(self._names[self._done], {}, 0, ended))
            finally:
                answers.kill()
        return ""

    def _out_of_time(self) -> str:
        if not self._done:
            return "no time for its first case"
        return f"no time for more than {self._done} of {len(self._names or ())} cases"

    def _next_task(self) -> Task:
        """What has not been measured, or the first case of it that needs its own environment."""
        task = replace(self._task, first=self._done)
        if not self.plan.variables:
            return task
        return replace(task, stop=self._done + 1, variables=self.plan.variables[self._done])

    def _take(self, answers: Answers, until: float, stop: int | None) -> bool:
        """All that a process answers, to case `stop`; False where time is over. Raises EOFError."""
        said = answers.next(self._left(until))
        if said is None:
            return False
        self._names = NAMES.validate_json(said)
        while self._done < len(self._names[:stop]):
            said = answers.next(self._left(until))
            if said is None:
                return False
            self._cases.append(MEASURED.validate_json(said))
        return True

    def _left(self, until: float) -> float:
        return max(until - self._clock(), 0)
