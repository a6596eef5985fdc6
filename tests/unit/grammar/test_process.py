"""Grammar processes themselves: started, limited, ended, and none left behind."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from engine.grammar.remote.process import (
    BACKGROUND_NICENESS,
    GrammarProcess,
    GrammarProcesses,
)
from engine.grammar.remote.wire import Report, read_report, request_frame
from engine.grammar.vocabulary import Vocabulary
from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT
from engine.process.sockets import FrameBuffer
from tests.grammars import DEMO_VOCAB_SIZE

pytestmark = pytest.mark.process

ENDLESS = r"[\w\s]*[^\d]?" * 2000


@pytest.fixture
def processes() -> Iterator[GrammarProcesses]:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(DEFAULT_CHECKPOINT / "tokenizer.json"))
    made = GrammarProcesses(Vocabulary(tokenizer, DEMO_VOCAB_SIZE, frozenset({2})))
    yield made
    made.close()


@pytest.fixture
def started() -> Callable[[], list[psutil.Process]]:
    """The grammar processes that the test has started. Engines on threads of this process, which
    other tests share, may have some of their own.
    """
    others = {child.pid for child in children()}
    return lambda: [child for child in children() if child.pid not in others]


def children() -> list[psutil.Process]:
    return [
        child for child in psutil.Process().children() if "engine.grammar.worker" in command(child)
    ]


def command(child: psutil.Process) -> list[str]:
    """It has none for a moment while it is being started."""
    while not (words := child.cmdline()):
        pass
    return words


def trial(process: GrammarProcess, text: str, seconds: float = 60.0) -> Report:
    """Raises EOFError where it ends."""
    job = {"do": "try", "client": "", "kind": "regex", "text": text, "seconds": seconds}
    process.connection.settimeout(120)
    process.connection.sendall(request_frame(job))
    frames = FrameBuffer()
    while data := process.connection.recv(1 << 16):
        for body in frames.add(data):
            said = read_report(body)
            assert isinstance(said, Report)
            return said
    raise EOFError


def test_one_more_than_is_asked_for_has_begun_and_none_is_left(
    started: Callable[[], list[psutil.Process]], processes: GrammarProcesses
) -> None:
    first = processes.start()
    assert len(started()) == 2
    (spare,) = {child.pid for child in started()} - {first._process.pid}
    second = processes.start()
    assert second._process.pid == spare
    assert trial(second, "a").fields["error"] is None
    for process in (first, second):
        assert process.end() in {0, -signal.SIGKILL}  # by itself, where the machine lets it soon
    processes.close()
    assert started() == []
    with pytest.raises(OSError, match="has stopped"):
        processes.start()


def test_a_spare_that_was_killed_is_not_handed_out(
    started: Callable[[], list[psutil.Process]], processes: GrammarProcesses
) -> None:
    first = processes.start()
    (spare,) = {child.pid for child in started()} - {first._process.pid}
    os.kill(spare, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(spare)], timeout=60)
    second = processes.start()
    assert trial(second, "a").fields["error"] is None
    first.kill()
    second.kill()


def test_nothing_comes_from_the_current_directory(
    processes: GrammarProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the user's, whose project may have an `engine` of its own."""
    for name in ("engine.py", "json.py", "llguidance.py"):
        (tmp_path / name).write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    process = processes.start()
    assert trial(process, "a").fields["error"] is None
    process.kill()


def test_processor_time_ends_it(processes: GrammarProcesses) -> None:
    process = processes.start()
    with pytest.raises(EOFError):
        trial(process, ENDLESS, seconds=0.2)
    assert process.kill() == -signal.SIGPROF


def test_what_raises_in_it_is_no_kill_from_outside(processes: GrammarProcesses) -> None:
    process = processes.start()
    process.connection.sendall(request_frame({"do": "nothing", "client": "", "seconds": 1.0}))
    process.connection.settimeout(120)
    assert process.connection.recv(10) == b""
    assert process.kill() == 1


def test_none_takes_descriptors_that_are_not_its_own(processes: GrammarProcesses) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(5):
        processes.start().kill()
    with suppress(FileNotFoundError):
        assert len(os.listdir("/proc/self/fd")) <= before + 2  # the vocabulary's, and a spare's


def test_work_in_the_background_yields_to_the_daemon(processes: GrammarProcesses) -> None:
    """In its own session it would not: there niceness counts among its own alone."""
    quick, slow = processes.start(), processes.start_in_background()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, quick._process.pid) == own
    assert os.getpriority(os.PRIO_PROCESS, slow._process.pid) == min(own + BACKGROUND_NICENESS, 19)
    assert os.getsid(slow._process.pid) == os.getsid(0)
    assert os.getpgid(slow._process.pid) != os.getpgid(0)
    quick.kill()
    slow.kill()
