"""`rootstock doctor --measure`: the report, its sections, and the processes that measure them.

The driver measures each section in child processes, within a time limit: the device may end a
process, as Metal does when a command buffer gets no memory. What the process has sent by then
counts, and another process continues after the case that ended it. A child runs
`python -m measuring`, receives one Task, and answers with JSON. This module imports no MLX.

A report can be sent to anybody: it has no path, no name of a user, a host or a model, and no text
of a prompt.
"""

import getpass
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

from pydantic import TypeAdapter

from engine.api import Report, one_line
from engine.mlx_backend.environment import MAX_OPERATIONS
from engine.process.child import ending, start_child
from engine.values.settings import EngineConfig

BUFFER_OPERATIONS = (50, 200, 2000)
"""The limits on a command buffer's operations that are compared. MLX's own are 20 to 100."""

LEAST_ROUNDS = 3
"""Rounds of a case that are measured however long they take."""

PACKAGES = ("mlx", "mlx-lm", "rootstock-serve")

Clock: TypeAlias = Callable[[], float]
"""Seconds since some fixed moment."""

Figures: TypeAlias = Mapping[str, float | int | str]
"""The figures of a case by name. Names end in a unit: `_ms`, `_mib`, `_gib`, `_times` (a ratio)."""

Cases: TypeAlias = Mapping[str, Callable[[], Figures]]
"""The cases of a section by name, in order. A call measures the case. It may raise any exception.
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. Tests measure less."""

    contexts: tuple[int, ...] = (1024, 4096, 16_384)  # tokens of a row, where attention is measured
    rows: tuple[int, ...] = (1, 4, 8)
    rounds: int = 9  # at most; a case's figures are medians over its rounds
    case_seconds: float = 4.0  # after which no round of a case begins, except the first few
    step_contexts: tuple[int, ...] = (256, 2048)  # tokens of a row, where steps are measured
    prompt_tokens: int = 8192  # of all prompts together, where memory is measured
    pool_bytes: int = 64 << 20  # one layer's K or V, where donation is measured
    architectures: tuple[str, ...] = ()  # whose check at load is measured; empty: all


@dataclass(frozen=True, slots=True)
class MeasureConfig:
    """What to measure, and in how many seconds."""

    engine: EngineConfig
    sizes: Sizes = field(default_factory=Sizes)
    seconds: float = 570.0  # ten minutes, less what the command itself takes


@dataclass(frozen=True, slots=True)
class MeasuredCase:
    """The figures of one case, or why there are none."""

    case: str
    figures: Figures
    seconds: float  # that it took in all
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """The cases of one measurement, in the order in which they were measured."""

    name: str
    about: str  # what the figures mean
    cases: tuple[MeasuredCase, ...]
    seconds: float
    cut: str = ""  # why cases are missing; "" if none are


@dataclass(frozen=True, slots=True)
class Measurements:
    """The report: all sections, and the seconds from the start to the end."""

    sections: tuple[Section, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Task:
    """The cases of a section to measure: those from index `first` on, before index `stop`."""

    section: str
    first: int
    config: MeasureConfig
    scratch: Path  # an empty directory for temporary files
    stop: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)  # environment of its process


TASK = TypeAdapter(Task)
NAMES = TypeAdapter(list[str])
"""The names of all cases of the section: the first answer to a task."""
MEASURED = TypeAdapter(MeasuredCase)
"""One case: every later answer."""

_EXIT_SECONDS = 10.0
_PATH = re.compile(r"\S*[/\\]\S*")
_HIDDEN = "..."


@dataclass(frozen=True, slots=True)
class SectionPlan:
    """A section to measure. `measuring.process.cases_of` has its cases, by the section's name."""

    name: str
    weight: float  # its share of the time, relative to the sections after it
    about: str
    variables: tuple[Mapping[str, str], ...] = ()
    """The environment of each case's process: MLX reads some variables only once in the life of a
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
        "attention choice",
        10,
        "Attentions compared anew, on a GPU, for each kind of layer of the configured model, in "
        "milliseconds a layer by rows and keys. What serves is kept for the daemon's next start.",
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
    """A child process that measures one task, and the connection to it."""

    def __init__(self, task: Task) -> None:
        """Raises OSError if no process can be started."""
        # A library that crashes prints long reports.
        ours, self._process = start_child(
            "measuring", errors=subprocess.DEVNULL, variables=task.variables
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
        """End the process, whatever it does. Does nothing if the process has ended."""
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


def serve(connection: Connection, begin: Callable[[Task], Cases]) -> None:
    """Receive a task, make its cases with `begin`, and send their names, then each result.

    If `begin` fails, the only case has the section's name and the reason.
    """
    task = TASK.validate_json(connection.recv_bytes())
    try:
        cases = begin(task)
    except (Exception, SystemExit) as error:
        connection.send_bytes(NAMES.dump_json([task.section]))
        failed = MeasuredCase(task.section, {}, 0, reason(error))
        connection.send_bytes(MEASURED.dump_json(failed))
        return
    names = list(cases)
    connection.send_bytes(NAMES.dump_json(names))
    for name in names[task.first : task.stop]:
        connection.send_bytes(MEASURED.dump_json(_measured(name, cases[name])))


def _measured(name: str, measure: Callable[[], Figures]) -> MeasuredCase:
    started, problem = time.perf_counter(), ""
    figures: Figures = {}
    try:
        figures = measure()
    # Models raise all kinds of exceptions, and one exits when a package of its own is missing.
    except (Exception, SystemExit) as error:
        problem = reason(error)
    return MeasuredCase(name, figures, time.perf_counter() - started, problem)


def reason(error: BaseException) -> str:
    """The error's type and message on one line, without paths and without the names of the user
    and the host. Any word with a slash counts as a path.
    """
    message = one_line(error).removeprefix(type(error).__name__).strip()
    if not message:
        return type(error).__name__
    message = _PATH.sub(_HIDDEN, message)
    for name in filter(None, (_user(), platform.node(), platform.node().partition(".")[0])):
        whole_word = rf"(?<!\w){re.escape(name)}(?!\w)"
        message = re.sub(whole_word, _HIDDEN, message, flags=re.IGNORECASE)
    return f"{type(error).__name__}: {message}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in containers
        return ""


def rounds(
    most: int, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Iterator[int]:
    """Count rounds from 0, at most `most`. No round begins after `seconds`, except the first
    LEAST_ROUNDS.
    """
    end = clock() + seconds
    for done in range(most):
        if done >= LEAST_ROUNDS and clock() > end:
            return
        yield done


def package_versions() -> dict[str, str]:
    """The version of each of PACKAGES, or "not installed"."""
    return {package: _version(package) for package in PACKAGES}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
