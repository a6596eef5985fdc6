"""Grammar processes themselves: started, limited, ended, and none left behind."""

import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from engine.grammar.process import (
    BACKGROUND_NICENESS,
    GrammarProcess,
    GrammarProcesses,
    Vocabulary,
)
from engine.grammar.wire import JobReport, ReportKind, WireMessage
from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT
from engine.process.child import start_child
from tests.grammars import DEMO_VOCAB_SIZE
from tests.polling import until

pytestmark = pytest.mark.process

ENDLESS = r"[\w\s]*[^\d]?" * 2000


@pytest.fixture
def processes() -> Iterator[GrammarProcesses]:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(DEFAULT_CHECKPOINT / "tokenizer.json"))
    made = GrammarProcesses(Vocabulary(tokenizer, DEMO_VOCAB_SIZE, frozenset({2})))
    yield made
    made.close()


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[int]]:
    """The processes that the test has started and that still run. Engines on threads of this
    process, which other tests share, may have some of their own, which end at any time.
    """
    made: list[subprocess.Popen[bytes]] = []

    def start(*arguments: Any, **named: Any) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        connection, child = start_child(*arguments, **named)
        made.append(child)
        return connection, child

    monkeypatch.setattr("engine.grammar.process.start_child", start)
    return lambda: {child.pid for child in made if child.poll() is None}


def receive(process: GrammarProcess) -> JobReport:
    """The next report. Raises EOFError where it ends."""
    while not (reports := process.receive()):
        select.select([process.connection], [], [], 120)
    (report,) = reports
    return report


def ask(process: GrammarProcess, **fields: Any) -> JobReport:
    """What a process that has just started says to a job. Raises EOFError where it ends."""
    assert receive(process).kind is ReportKind.READY
    job: WireMessage = {"id": 1, "seconds": 60.0, **fields}
    process.send(job)
    assert process.flush()
    return receive(process)


def trial(process: GrammarProcess, text: str, seconds: float = 60.0) -> JobReport:
    return ask(process, do="try", kind="regex", text=text, seconds=seconds)


def ended(process: GrammarProcess) -> int:
    """Its exit code. One that has closed its socket ends by itself."""
    process.kill()
    return process.wait()


def test_one_more_than_is_asked_for_has_begun_and_none_is_left(
    running: Callable[[], set[int]], processes: GrammarProcesses
) -> None:
    first = processes.start()
    processes.prepare()
    processes.prepare()
    assert len(running()) == 2
    (spare,) = running() - {first._process.pid}
    second = processes.start()
    assert second._process.pid == spare
    assert trial(second, "a").error == ""
    for process in (first, second):
        assert process.end() in {0, -signal.SIGKILL}  # by itself, where the machine lets it soon
    processes.close()
    assert running() == set()
    with pytest.raises(OSError, match="has stopped"):
        processes.start()


def test_a_spare_that_was_killed_is_not_handed_out(
    running: Callable[[], set[int]], processes: GrammarProcesses
) -> None:
    first = processes.start()
    processes.prepare()
    (spare,) = running() - {first._process.pid}
    os.kill(spare, signal.SIGKILL)
    until(lambda: spare not in running())
    second = processes.start()
    assert trial(second, "a").error == ""
    for process in (first, second):
        assert ended(process) == -signal.SIGKILL


def test_nothing_comes_from_the_current_directory(
    processes: GrammarProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the user's, whose project may have an `engine` of its own."""
    for name in ("engine.py", "json.py", "llguidance.py"):
        (tmp_path / name).write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    process = processes.start()
    assert trial(process, "a").error == ""
    ended(process)


def test_processor_time_ends_it(processes: GrammarProcesses) -> None:
    process = processes.start()
    with pytest.raises(EOFError):
        trial(process, ENDLESS, seconds=0.2)
    assert ended(process) == -signal.SIGPROF


def test_what_raises_in_it_is_no_kill_from_outside(processes: GrammarProcesses) -> None:
    process = processes.start()
    with pytest.raises(EOFError):
        ask(process, do="nothing")
    assert ended(process) == 1


def test_none_takes_descriptors_that_are_not_its_own(processes: GrammarProcesses) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(5):
        ended(processes.start())
    with suppress(FileNotFoundError):
        assert len(os.listdir("/proc/self/fd")) <= before + 1  # the vocabulary's


def test_work_in_the_background_yields_to_the_daemon(processes: GrammarProcesses) -> None:
    """In its own session it would not: there niceness counts among its own alone."""
    process, own = processes.start(), os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, process._process.pid) == own
    process.yield_to_others()
    pid = process._process.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(own + BACKGROUND_NICENESS, 19)
    assert os.getsid(pid) == os.getsid(0)
    assert os.getpgid(pid) != os.getpgid(0)
    ended(process)
