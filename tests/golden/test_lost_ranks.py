"""When a rank is lost in the midst of steps, all processes of the model end."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from engine.mlx_backend.ranks.link import SILENT_SECONDS
from engine.process.child import REPORTED_STATUS
from tests.checkpoints import write_family
from tests.golden.decoding_ranks import STEP
from tests.golden.ranking import SIX_HEADS

END_SECONDS = SILENT_SECONDS + 10
"""Within which all must have ended. The machine may be busy."""

pytestmark = pytest.mark.process


class Decoding:
    """Rank 0 and its other ranks, in the midst of steps."""

    def __init__(self, checkpoint: Path, ranks: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.golden.decoding_ranks", str(checkpoint), str(ranks)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        self.lines = self.process.stdout
        n_steps = 0
        while n_steps < 5:
            line = self.lines.readline()
            assert line, "rank 0 has ended"
            n_steps += line.strip() == STEP
        self.others = psutil.Process(self.process.pid).children()
        assert len(self.others) == ranks - 1

    def last_line(self) -> str:
        """The last line of rank 0, which ends."""
        *_, last = self.lines.readlines()
        return last.strip()

    def kill(self) -> None:
        for process in self.others:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()
        self.lines.close()


@pytest.fixture
def decode(
    checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> Iterator[Callable[[int], Decoding]]:
    started = list[Decoding]()

    def start(ranks: int) -> Decoding:
        checkpoint = checkpoint_of("llama") if ranks == 2 else write_family(SIX_HEADS, tmp_path)
        started.append(Decoding(checkpoint, ranks))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def wait_for(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, END_SECONDS)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


def test_a_rank_is_killed(decode: Callable[[int], Decoding]) -> None:
    running = decode(2)
    began = time.monotonic()
    running.others[0].kill()
    assert running.last_line() == "rank 1 has ended"
    assert time.monotonic() - began < SILENT_SECONDS
    assert running.process.wait(END_SECONDS) == REPORTED_STATUS


@pytest.mark.slow
def test_one_of_three_is_killed(decode: Callable[[int], Decoding]) -> None:
    running = decode(3)
    running.others[1].kill()
    assert running.last_line() == "rank 2 has ended"
    assert running.process.wait(END_SECONDS) == REPORTED_STATUS
    wait_for(running.others)


@pytest.mark.slow
def test_a_rank_is_stopped(decode: Callable[[int], Decoding]) -> None:
    """It is killed, too, although it is stopped."""
    running = decode(2)
    running.others[0].send_signal(signal.SIGSTOP)
    assert running.last_line() == "rank 1 has been silent for 5 s"
    assert running.process.wait(END_SECONDS) == REPORTED_STATUS
    wait_for(running.others)


@pytest.mark.slow
def test_rank_0_is_killed(decode: Callable[[int], Decoding]) -> None:
    running = decode(2)
    running.process.kill()
    wait_for(running.others)


@pytest.mark.slow
def test_rank_0_is_stopped(decode: Callable[[int], Decoding]) -> None:
    """The other rank kills it."""
    running = decode(2)
    running.process.send_signal(signal.SIGSTOP)
    assert running.process.wait(END_SECONDS) == -signal.SIGKILL
    wait_for(running.others)
