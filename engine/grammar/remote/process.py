"""A grammar process and the socket to it."""

import os
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import BinaryIO

from engine.grammar.vocabulary import Vocabulary
from engine.process.child import start_child

ENDED_BY_OTHERS = -signal.SIGKILL
"""The exit code that says nothing of a grammar, unless the daemon has killed the process: it comes
from the system or another program. A grammar ends its process by SIGPROF, SIGSEGV, SIGABRT or an
exception.
"""

START_SECONDS = 60.0
"""Of the clock, until a process begins its first job, or the next."""

STUCK_SECONDS = 30.0
"""Of the clock, for any job, besides what a busy machine makes of its processor time."""

BUSY_FACTOR = 30.0
"""How much longer a job may take on a busy machine: thrice what its niceness says."""

BACKGROUND_NICENESS = 10
"""Above the daemon's own: about a tenth of a processor that the daemon wants, too."""

_LAST_WORDS_SECONDS = 0.2
"""One that has nothing to do ends by itself when its socket closes."""


def patience_seconds(seconds: float) -> float:
    """Of the clock, for a job that may take so many of the processor. One that takes longer is
    stuck: what waits and does not compute meets no limit of processor time.
    """
    return STUCK_SECONDS + BUSY_FACTOR * seconds


class GrammarProcess:
    """One `engine.grammar.worker`. `connection` is the daemon's end of the pair."""

    def __init__(self, vocabulary: BinaryIO) -> None:
        """Raises OSError where no process can be started."""
        # A library that crashes says so at length.
        self.connection, self._process = start_child(
            "engine.grammar.worker",
            descriptors=[vocabulary.fileno()],
            errors=subprocess.DEVNULL,
        )

    def yield_to_others(self) -> None:
        """Leave the processor to what is computed for others, from now on."""
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + BACKGROUND_NICENESS
        with suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)

    def end(self) -> int:
        """Let it go; its exit code, negative for the signal that has ended it. Returns soon."""
        with suppress(OSError):
            self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_LAST_WORDS_SECONDS)
        return self.kill()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> int:
        """End it, whatever it does; its exit code, as of `end`. Returns at once."""
        with suppress(OSError):
            self.connection.close()
        self._process.kill()
        return self._process.wait()


class GrammarProcesses:
    """Starts grammar processes, which share what they read of the vocabulary. From any thread.

    To read a large vocabulary takes over a second. So one process more has always begun to: a
    client that ends a process delays no other by that.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._file: BinaryIO | None = None  # made with the first grammar
        self._spare: GrammarProcess | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        self.starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-starter")
        """For who may not wait for a start: it takes two processes' time, and at first that of
        writing the vocabulary, some 10 MB.
        """

    def start(self) -> GrammarProcess:
        """Raises OSError where none can be started."""
        with self._lock:
            if self._is_closed:
                raise OSError("the engine has stopped")
            self._file = self._file or self._vocabulary.file()
            started = self._taken_spare() or GrammarProcess(self._file)
            with suppress(OSError):  # perhaps the next time
                self._spare = GrammarProcess(self._file)
            return started

    def start_in_background(self) -> GrammarProcess:
        """The same for work that may keep a processor busy. Raises OSError."""
        process = self.start()
        process.yield_to_others()
        return process

    def _taken_spare(self) -> GrammarProcess | None:
        """None where there is none, or it has ended."""
        spare, self._spare = self._spare, None
        if spare is not None and not spare.is_running:
            spare.end()
            return None
        return spare

    def close(self) -> None:
        """Start no more. Those that run are their users' to end."""
        self.starter.shutdown(wait=False)
        with self._lock:
            self._is_closed = True
            if self._spare is not None:
                self._spare.kill()
            if self._file is not None:
                self._file.close()
