"""Measures all sections within a time limit, each in child processes. Imports no MLX."""

import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

from engine.api import Report
from engine.measuring.messages import (
    MEASURED,
    NAMES,
    TASK,
    MeasureConfig,
    MeasuredCase,
    Measurements,
    Section,
    Task,
)
from engine.mlx_backend.backend import MAX_OPERATIONS
from engine.process.child import ending, start_child

BUFFER_OPERATIONS = (50, 200, 2000)
"""The limits on a command buffer's operations that are compared. MLX's own are 20 to 100."""

Clock: TypeAlias = Callable[[], float]
"""Seconds since some fixed moment."""

_EXIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class SectionPlan:
    """A section to measure. `engine.measuring.worker` has its cases, by the section's name."""

    name: str
    weight: float  # its share of the time, relative to the sections after it
    about: str
    variables: tuple[Mapping[str, str], ...] = ()
    """The environment of each case's process, for what MLX reads only once in the life of a
    process. Empty: all cases share one process.
    """


SECTIONS = (
    SectionPlan("machine", 3, "The device, and the model of `step` and `memory`."),
    SectionPlan(
        "attention",
        12,
        "Attention of one decoded token of each row, rows x tokens before it; 16 heads over 8 KV "
        "heads of 128, float32 on a CPU and bfloat16 elsewhere, milliseconds a layer. `contiguous` "
        "is MLX's attention over contiguous keys, without a gather, and `times` compares with it.",
    ),
    SectionPlan(
        "layouts",
        16,
        "The same attention after a gather of shuffled blocks, in two layouts of the arena: "
        "`today`, [blocks, heads, block, dim], and `other`, [blocks, block, heads, dim]. `gather` "
        "is the gather alone, and `by row` attends to one row after the other. `other_times` "
        "below 1: the other layout is faster.",
    ),
    SectionPlan(
        "step",
        15,
        "A decode step of the engine, and of mlx-lm's model with its own caches on the same "
        "weights, rows x tokens before them. `engine_times` is the engine's time over mlx-lm's, "
        "`compiled_share` is how many of its steps were compiled.",
    ),
    SectionPlan(
        "memory",
        10,
        "What steps took in addition to weights and storage, at most since the model was loaded, "
        "and what was promised for them. One prompt alone, then several rows together.",
    ),
    SectionPlan(
        "donation",
        4,
        "The growth of memory over twenty steps, each submitted while the one before is in "
        "flight: chunks with decodes, and compiled decodes. `pools_times` of 1 or more: a write "
        "has copied a pool. On a CPU steps are launched ahead, on GPUs when the device is idle.",
    ),
    SectionPlan(
        "command buffers",
        12,
        "A decode step of the engine, in milliseconds by rows, where Metal's command buffers and "
        f"CUDA's graphs end after this number of operations ({MAX_OPERATIONS}). `taken_mib` is the "
        "most that steps took in addition to weights and storage, `cached_mib` what MLX's buffer "
        "cache held. The section `step` has MLX's own limit. It does not apply to a CPU.",
        tuple({MAX_OPERATIONS: str(operations)} for operations in BUFFER_OPERATIONS),
    ),
    SectionPlan(
        "load check",
        44,
        "A tiny random checkpoint of every architecture in the daemon's check at load: how its "
        "rows share forwards, with which attention, and how far its logits are from those with "
        "mlx-lm's own caches, relative to their size.",
    ),
)
"""In the order in which they are measured. The longest is last and gets all the time left."""


class MeasuringProcess:
    """One `engine.measuring.worker`, and the connection to it."""

    def __init__(self, task: Task) -> None:
        """Raises OSError if no process can be started."""
        # A library that crashes prints long reports.
        ours, self._process = start_child(
            "engine.measuring.worker", errors=subprocess.DEVNULL, variables=task.variables
        )
        self._connection = Connection(ours.detach())
        self._connection.send_bytes(TASK.dump_json(task))

    def next(self, seconds: float) -> bytes | None:
        """The next answer, or None if it does not come within `seconds`.

        Raises EOFError when there are no more.
        """
        try:
            return self._connection.recv_bytes() if self._connection.poll(seconds) else None
        except ConnectionError as error:
            raise EOFError from error

    def how_it_ended(self) -> str:
        """Why there are no more answers; "" if the process ended well."""
        try:
            code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "its process fell silent"
        return f"its process ended: {ending(code)}" if code else ""

    def kill(self) -> None:
        """End the process, whatever it does. Does nothing to one that has ended."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


Start: TypeAlias = Callable[[Task], MeasuringProcess]


def measure(
    config: MeasureConfig,
    report: Report,
    start: Start = MeasuringProcess,
    clock: Clock = time.monotonic,
) -> Measurements:
    """Measure all sections in child processes. Returns within `config.seconds`.

    A section that exceeds its share of the time is cut short; it continues if the other sections
    leave time. A case whose process dies is reported as failed. Ctrl-C ends all sections.
    """
    began = clock()
    end = began + config.seconds
    with tempfile.TemporaryDirectory(prefix="rootstock-") as scratch:
        tasks = [Task(plan.name, 0, config, Path(scratch)) for plan in SECTIONS]
        runs = [SectionRun(*each, start, clock) for each in zip(SECTIONS, tasks, strict=True)]
        try:
            _measure_each(runs, end, report, clock)
            _measure_each([run for run in runs if run.has_cases_left], end, report, clock)
        except KeyboardInterrupt:
            for run in runs:
                run.stop()
    return Measurements(tuple(run.section() for run in runs), clock() - began)


def _measure_each(runs: Sequence["SectionRun"], end: float, report: Report, clock: Clock) -> None:
    for index, run in enumerate(runs):
        now = clock()
        until = end_of_share(now, end, [later.plan.weight for later in runs[index:]])
        if until > now:
            report(f"{run.title}, at most {until - now:.0f} s")
            run.measure(until)


def end_of_share(now: float, end: float, weights: Sequence[float]) -> float:
    """When the first of these sections must stop, so that those after it have their shares of the
    time until `end`.
    """
    return now + weights[0] / sum(weights) * max(end - now, 0)


class SectionRun:
    """One section: what has been measured of it, and how to continue."""

    def __init__(self, plan: SectionPlan, task: Task, start: Start, clock: Clock) -> None:
        self.plan = plan
        self._task = task
        self._start = start
        self._clock = clock
        self._names: list[str] | None = None  # of all cases, once a process has sent them
        self._cases = list[MeasuredCase]()
        self._seconds = 0.0
        self._cut = "no time was left"

    @property
    def has_cases_left(self) -> bool:
        """Whether more time would bring more cases."""
        return self._names is None or len(self._cases) < len(self._names)

    @property
    def title(self) -> str:
        done = len(self._cases)
        return f"{self.plan.name}, from case {done + 1} on" if done else self.plan.name

    def section(self) -> Section:
        """The section as far as it has been measured."""
        plan = self.plan
        return Section(plan.name, plan.about, tuple(self._cases), self._seconds, self._cut)

    def stop(self) -> None:
        """Note that Ctrl-C has ended the section, unless all of it was measured."""
        self._cut = self._cut and "stopped by hand"

    def measure(self, until: float) -> None:
        """Measure one case after another, until that time by the clock."""
        started = self._clock()
        try:
            self._cut = self._measure_cases(until)
        finally:
            self._seconds += self._clock() - started

    def _measure_cases(self, until: float) -> str:
        """Returns why cases are missing, or ""."""
        while self.has_cases_left:
            done = len(self._cases)
            task = replace(self._task, first=done)
            if self.plan.variables:  # a process for each case
                task = replace(task, stop=done + 1, variables=self.plan.variables[done])
            process = self._start(task)
            try:
                if not self._take_answers(process, until, task.stop):
                    if self._names is None or not self._cases:
                        return "no time for its first case"
                    return f"no time for more than {len(self._cases)} of {len(self._names)} cases"
            except EOFError:
                ended = process.how_it_ended() or "its process ended early"
                if self._names is None:
                    return ended
                self._cases.append(MeasuredCase(self._names[len(self._cases)], {}, 0, ended))
            finally:
                process.kill()
        return ""

    def _take_answers(self, process: MeasuringProcess, until: float, stop: int | None) -> bool:
        """Take answers until case `stop`, or all. False if the time is up. Raises EOFError."""

        def answer() -> bytes | None:
            return process.next(max(until - self._clock(), 0))

        names = answer()
        if names is None:
            return False
        self._names = NAMES.validate_json(names)
        while len(self._cases) < len(self._names[:stop]):
            measured = answer()
            if measured is None:
                return False
            self._cases.append(MEASURED.validate_json(measured))
        return True
