"""The process that measures: what it answers, and how it ends."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from engine.mlx_backend.backend import MAX_OPERATIONS
from engine.values.settings import EngineConfig
from measuring.doctor import (
    MEASURED,
    NAMES,
    TASK,
    Cases,
    Figures,
    MeasureConfig,
    MeasuringProcess,
    Task,
    serve,
)

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


def test_it_begins_where_another_ended(tmp_path: Path) -> None:
    scripted = {"bad": fail, "good": answer}
    names, only = answers_to(task_of("donation", tmp_path, first=1), lambda task: scripted)
    assert len(NAMES.validate_json(names)) == 2
    assert MEASURED.validate_json(only).case == "good"


def test_it_ends_before_the_case_that_another_process_measures(tmp_path: Path) -> None:
    scripted = {"good": answer, "other": fail}
    task = replace(task_of("donation", tmp_path), stop=1)
    names, only = answers_to(task, lambda task: scripted)
    assert len(NAMES.validate_json(names)) == 2
    assert MEASURED.validate_json(only).case == "good"


def test_a_section_that_cannot_begin_says_why(tmp_path: Path) -> None:
    def begin(task: Task) -> Cases:
        raise RuntimeError("no device")

    names, only = answers_to(task_of("donation", tmp_path), begin)
    assert NAMES.validate_json(names) == ["donation"]
    assert MEASURED.validate_json(only).problem == "RuntimeError: no device"


def test_a_real_process_measures_and_ends_well(tmp_path: Path) -> None:
    process = MeasuringProcess(task_of("machine", tmp_path))
    try:
        names = process.next(PATIENCE_SECONDS)
        assert names is not None
        assert NAMES.validate_json(names) == ["machine", "model"]
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


def test_a_process_has_the_variables_of_its_task(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    variables = {MAX_OPERATIONS: "200"}
    process = MeasuringProcess(replace(task_of("machine", tmp_path), variables=variables))
    try:
        (child,) = set(psutil.Process().children()) - before
        assert process.next(PATIENCE_SECONDS) is not None
        assert child.environ()[MAX_OPERATIONS] == "200"
    finally:
        process.kill()


def test_a_process_that_does_nothing_is_killed(tmp_path: Path) -> None:
    process = MeasuringProcess(replace(task_of("load check", tmp_path)))
    assert process.next(0.0) is None
    process.kill()
    assert process.how_it_ended() == "its process ended: SIGKILL"
