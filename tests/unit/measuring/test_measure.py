"""Sections within a time, in processes that may end, hang and be stopped by hand."""

import math
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from engine.api import ModelError
from engine.mlx_backend.environment import MAX_OPERATIONS
from engine.values.settings import EngineConfig
from measuring.doctor import (
    BUFFER_OPERATIONS,
    MEASURED,
    NAMES,
    SECTIONS,
    TASK,
    Cases,
    Figures,
    MeasureConfig,
    MeasuredCase,
    MeasuringProcess,
    Section,
    Task,
    end_of_share,
    measure,
    reason,
    serve,
)

CASES = ("one", "two", "three")
CONFIG = MeasureConfig(EngineConfig("/home/somebody/model"))

Ending = Callable[[], bytes]
"""What comes in place of a case's answer."""


def crash() -> bytes:
    raise EOFError


def ctrl_c() -> bytes:
    raise KeyboardInterrupt


CRASH, CTRL_C, HANG = (0.0, crash), (0.0, ctrl_c), (math.inf, crash)


@dataclass
class Machine:
    """Every case takes `case_seconds`; `endings` are of (section, case)."""

    case_seconds: float = 1.0
    endings: Mapping[tuple[str, str], tuple[float, Ending]] = field(default_factory=dict)
    now: float = 100.0
    started: list[Task] = field(default_factory=list)
    killed: int = 0
    names: Mapping[str, Sequence[str]] = field(
        default_factory=lambda: defaultdict(lambda: list(CASES))
    )

    def start(self, task: Task) -> "Process":
        self.started.append(task)
        return Process(self, task)

    def clock(self) -> float:
        return self.now

    def measured(self) -> dict[str, Section]:
        found = measure(CONFIG, lambda line: None, self.start, self.clock)
        assert self.killed == len(self.started)
        assert found.seconds <= CONFIG.seconds
        return {section.name: section for section in found.sections}


class Process(MeasuringProcess):
    """A process that answers as its Machine says."""

    def __init__(self, machine: Machine, task: Task) -> None:
        self._machine = machine
        self._task = task
        self._left = self._answers()

    def next(self, seconds: float) -> bytes | None:
        takes, answer = next(self._left, (0.0, crash))
        self._machine.now += min(takes, seconds)
        return answer() if takes <= seconds else None

    def how_it_ended(self) -> str:
        return "its process ended: SIGABRT"

    def kill(self) -> None:
        self._machine.killed += 1

    def _answers(self) -> Iterator[tuple[float, Ending]]:
        """How long each takes, and what it is."""
        section, machine = self._task.section, self._machine
        names = machine.names[section]
        yield machine.endings.get((section, ""), (0.0, lambda: NAMES.dump_json(list(names))))
        for name in names[self._task.first :]:
            yield machine.endings.get((section, name), (machine.case_seconds, measured(name)))


def measured(name: str) -> Ending:
    return lambda: MEASURED.dump_json(MeasuredCase(name, {"x_ms": 1.5}, 1.0))


def names_of(section: Section) -> list[str]:
    return [case.case for case in section.cases]


def test_all_cases_of_all_sections() -> None:
    found = Machine().measured()
    assert list(found) == [plan.name for plan in SECTIONS]
    assert all(names_of(section) == list(CASES) for section in found.values())
    assert not any(section.cut for section in found.values())


def test_what_ends_a_process_costs_the_case_that_it_was_at() -> None:
    machine = Machine(endings={("step", "two"): CRASH})
    step = machine.measured()["step"]
    assert [case.problem for case in step.cases] == ["", "its process ended: SIGABRT", ""]
    assert [task.first for task in machine.started if task.section == "step"] == [0, 2]
    assert step.cut == ""


def test_each_limit_on_command_buffers_is_measured_in_a_process_of_its_own() -> None:
    """MLX reads it once in the life of a process."""
    machine = Machine()
    assert names_of(machine.measured()["command buffers"]) == list(CASES)
    tasks = [task for task in machine.started if task.section == "command buffers"]
    assert [(task.first, task.stop) for task in tasks] == [(0, 1), (1, 2), (2, 3)]
    limits = [task.variables for task in tasks]
    assert limits == [{MAX_OPERATIONS: str(operations)} for operations in BUFFER_OPERATIONS]


def test_the_last_case_may_end_its_process() -> None:
    machine = Machine(endings={("step", "three"): CRASH})
    assert machine.measured()["step"].cases[-1].problem == "its process ended: SIGABRT"
    assert [task.first for task in machine.started if task.section == "step"] == [0]


def test_a_process_that_never_begins_is_tried_once_more() -> None:
    machine = Machine(endings={("memory", ""): CRASH})
    memory = machine.measured()["memory"]
    assert (memory.cases, memory.cut) == ((), "its process ended: SIGABRT")
    assert [task.section for task in machine.started].count("memory") == 2


def test_a_case_that_hangs_cuts_its_section_at_the_case_before() -> None:
    found = Machine(endings={("attention", "two"): HANG}).measured()
    assert names_of(found["attention"]) == ["one"]
    assert found["attention"].cut == "no time for more than 1 of 3 cases"
    assert not found["load check"].cut


def test_a_section_goes_on_with_the_time_that_others_leave() -> None:
    """A case takes more than half of what `attention` has at first, and more than `machine` has."""
    names: dict[str, Sequence[str]] = {plan.name: ["one"] for plan in SECTIONS}
    machine = Machine(case_seconds=36.0, names={**names, "attention": CASES})
    found = machine.measured()
    assert names_of(found["attention"]) == list(CASES)
    firsts = [task.first for task in machine.started if task.section == "attention"]
    assert firsts == [0, 1]
    assert not any(section.cut for section in found.values())


def test_a_device_that_hangs_in_every_section_is_not_waited_for_longer_than_was_said() -> None:
    found = Machine(endings={(plan.name, "one"): HANG for plan in SECTIONS}).measured()
    assert {section.cut for section in found.values()} == {"no time for its first case"}


def test_a_section_without_cases_is_whole() -> None:
    machine = Machine(names={plan.name: [] for plan in SECTIONS})
    assert not any(section.cut for section in machine.measured().values())


def test_ctrl_c_keeps_what_there_is() -> None:
    found = Machine(endings={("layouts", "three"): CTRL_C}).measured()
    assert names_of(found["attention"]) == list(CASES)
    assert names_of(found["layouts"]) == ["one", "two"]
    assert found["layouts"].seconds == 2
    assert (found["step"].cases, found["step"].cut) == ((), "stopped by hand")


def test_what_a_section_leaves_the_others_have() -> None:
    assert end_of_share(0.0, 100.0, [1, 1, 2]) == 25
    assert end_of_share(10.0, 100.0, [1, 2]) == 40
    assert end_of_share(40.0, 100.0, [2]) == 100


def test_there_is_no_share_of_a_time_that_is_over() -> None:
    assert end_of_share(105.0, 100.0, [1, 1]) == pytest.approx(105)


PATIENCE_SECONDS = 120.0


def answer() -> Figures:
    return {"answer": 42}


def fail() -> Figures:
    raise MemoryError("no room in /dev/shm")


def leave() -> Figures:
    raise SystemExit(1)


def task_of(section: str, tmp_path: Path, first: int = 0) -> Task:
    return Task(section, first, MeasureConfig(EngineConfig("")), tmp_path)


def answers_to(task: Task, begin: Callable[[Task], Cases]) -> Iterator[bytes]:
    ours, theirs = Pipe()
    ours.send_bytes(TASK.dump_json(task))
    with ours:
        with theirs:
            assert isinstance(theirs, Connection)
            serve(theirs, begin)
        while ours.poll():
            try:
                yield ours.recv_bytes()
            except EOFError:
                return


def test_a_case_that_fails_is_a_case_with_a_reason(tmp_path: Path) -> None:
    scripted = {"bad": fail, "exits": leave, "good": answer}
    names, *cases = answers_to(task_of("donation", tmp_path), lambda task: scripted)
    assert NAMES.validate_json(names) == ["bad", "exits", "good"]
    bad, exits, good = map(MEASURED.validate_json, cases)
    assert (bad.problem, bad.figures) == ("MemoryError: no room in ...", {})
    assert exits.problem == "SystemExit: 1"
    assert (good.problem, good.figures) == ("", {"answer": 42})


def test_it_measures_the_cases_from_its_first_to_its_last(tmp_path: Path) -> None:
    """Another process measures the others."""
    scripted = {"bad": fail, "good": answer, "other": fail}
    task = replace(task_of("donation", tmp_path, first=1), stop=2)
    names, only = answers_to(task, lambda task: scripted)
    assert len(NAMES.validate_json(names)) == 3
    assert MEASURED.validate_json(only).case == "good"


def test_a_section_that_cannot_begin_says_why(tmp_path: Path) -> None:
    def begin(task: Task) -> Cases:
        raise RuntimeError("no device")

    names, only = answers_to(task_of("donation", tmp_path), begin)
    assert NAMES.validate_json(names) == ["donation"]
    assert MEASURED.validate_json(only).problem == "RuntimeError: no device"


def test_a_real_process_has_its_tasks_variables_measures_and_ends_well(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    variables = {MAX_OPERATIONS: "200"}
    process = MeasuringProcess(replace(task_of("machine", tmp_path), variables=variables))
    try:
        (child,) = set(psutil.Process().children()) - before
        names = process.next(PATIENCE_SECONDS)
        assert names is not None
        assert NAMES.validate_json(names) == ["machine", "model"]
        assert child.environ()[MAX_OPERATIONS] == "200"
        for _ in range(2):
            answer = process.next(PATIENCE_SECONDS)
            assert answer is not None
            assert MEASURED.validate_json(answer).problem == ""
        with pytest.raises(EOFError):
            process.next(PATIENCE_SECONDS)
        assert process.how_it_ended() == ""
    finally:
        process.kill()


def test_how_a_process_ended_is_said(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    process = MeasuringProcess(task_of("machine", tmp_path))
    try:
        (child,) = set(psutil.Process().children()) - before
        os.kill(child.pid, signal.SIGABRT)
        with pytest.raises(EOFError):
            process.next(PATIENCE_SECONDS)
        assert process.how_it_ended() == "its process ended: SIGABRT"
    finally:
        process.kill()


def test_a_process_that_does_nothing_is_killed(tmp_path: Path) -> None:
    process = MeasuringProcess(replace(task_of("load check", tmp_path)))
    assert process.next(0.0) is None
    process.kill()
    assert process.how_it_ended() == "its process ended: SIGKILL"


@pytest.fixture(autouse=True)
def somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    monkeypatch.setattr("platform.node", lambda: "engine.local")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            FileNotFoundError(2, "No such file or directory", "/Users/ada/models/x"),
            "FileNotFoundError: [Errno 2] No such file or directory: ...",
        ),
        (ModelError("org/model is not here"), "ModelError: ... is not here"),
        (ModelError("C:\\ada\\model is a file"), "ModelError: ... is a file"),
        (RuntimeError("of Ada on engine.local, engine"), "RuntimeError: of ... on ..., ..."),
        (RuntimeError("an adapter of engines"), "RuntimeError: an adapter of engines"),
        (KeyError("layers"), "KeyError: 'layers'"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_no_path_and_no_name_is_said(error: Exception, said: str) -> None:
    assert reason(error) == said


def test_a_user_without_a_name_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_user() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr("getpass.getuser", no_user)
    assert reason(RuntimeError("it failed")) == "RuntimeError: it failed"
