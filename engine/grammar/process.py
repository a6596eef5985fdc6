"""A grammar worker process as the daemon sees it, and how such processes start."""

import json
import os
import signal
import subprocess
import threading
from contextlib import suppress
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, BinaryIO

from engine.grammar.wire import JobReport, WireMessage, read_report, request_frame
from engine.process.child import start_child
from engine.process.footprint import footprint_bytes
from engine.process.sockets import FrameBuffer, send_some

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENDED_BY_OTHERS = -signal.SIGKILL
"""The exit code that says nothing of a grammar, unless the daemon has killed the process: it comes
from the system or another program. A grammar ends its process by SIGPROF, SIGSEGV, SIGABRT or an
exception.
"""

BACKGROUND_NICENESS = 10
"""Above the daemon's own: about a tenth of a processor that the daemon wants, too."""

READ_BYTES = 1024**2
"""At a time, so that a process that writes without end does not block the caller."""

_LAST_WORDS_SECONDS = 0.2
"""A process that has nothing to do ends by itself when its socket closes."""


class Vocabulary:
    """The tokens that grammars choose from: the model's, padding included, and further ones of the
    tokenizer.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._eos_token_ids = sorted(eos_token_ids)
        self.size = max(vocab_size, self._backend.get_vocab_size(with_added_tokens=True))

    def file(self) -> BinaryIO:
        """A nameless file for workers to read, some 10 MB for 150,000 tokens."""
        fields = {
            "tokenizer": self._backend.to_str(),
            "size": self.size,
            "eos": self._eos_token_ids,
        }
        file = TemporaryFile()  # noqa: SIM115  # it lives as long as the engine
        file.write(json.dumps(fields).encode())
        file.flush()
        return file


class GrammarProcess:
    """One `engine.grammar.worker` process. Only `end` and `wait` wait for it."""

    def __init__(self, vocabulary: BinaryIO) -> None:
        """Raises OSError where no process can be started."""
        # A library that crashes says so at length.
        self.connection, self._process = start_child(
            "engine.grammar.worker",
            descriptors=[vocabulary.fileno()],
            errors=subprocess.DEVNULL,
        )
        self.connection.setblocking(False)
        self._outbox = bytearray()
        self._frames = FrameBuffer()

    def send(self, message: WireMessage) -> None:
        """Queue a request. `flush` sends it."""
        self._outbox += request_frame(message)

    def flush(self) -> bool:
        """Send what the socket takes now. Returns False if some is left."""
        try:
            while self._outbox and (n_bytes := send_some(self.connection, self._outbox)):
                del self._outbox[:n_bytes]
        except OSError:
            self._outbox.clear()  # it has ended: `receive` says so once all that it sent is read
        return not self._outbox

    def receive(self) -> list[JobReport]:
        """The reports that have arrived. Raises EOFError when it has ended and all is read, and
        ProtocolError.
        """
        try:
            data = self.connection.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return [read_report(body) for body in self._frames.add(data)]

    def footprint_bytes(self) -> int | None:
        """The memory of the process on macOS, which does not enforce RLIMIT_DATA. Elsewhere
        None.
        """
        return footprint_bytes(self._process.pid)

    def yield_to_others(self) -> None:
        """Lower the priority of the process for the rest of its life."""
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + BACKGROUND_NICENESS
        with suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> int:
        """Close its socket and wait for a moment; its exit code, negative for the signal that has
        ended it.
        """
        with suppress(OSError):
            self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_LAST_WORDS_SECONDS)
        self.kill()
        return self.wait()

    def kill(self) -> None:
        """End it whatever it does, without waiting: to free its memory may take a while."""
        with suppress(OSError):
            self.connection.close()
        self._process.kill()

    def wait(self) -> int:
        """Wait until a process that was killed, or has closed its socket, has ended. Returns its
        exit code, as of `end`.
        """
        return self._process.wait()


class GrammarProcesses:
    """Starts worker processes, which share one file of the vocabulary. Safe from any thread.

    Reading a large vocabulary takes over a second, so a spare process is kept ready: the death of a
    worker delays no other client.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._file: BinaryIO | None = None  # made with the first process
        self._spare: GrammarProcess | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def start(self) -> GrammarProcess:
        """The spare process, or a new one where there is none. Raises OSError."""
        with self._lock:
            spare, self._spare = self._spare, None
            if spare is not None and not spare.is_running:
                spare.end()
                spare = None
            return spare or self._new()

    def prepare(self) -> None:
        """Start a spare process if there is none. Does nothing where that fails."""
        with self._lock, suppress(OSError):  # perhaps the next time
            self._spare = self._spare or self._new()

    def close(self) -> None:
        """Start no more processes. The owners of running ones end them."""
        with self._lock:
            self._is_closed = True
            if self._spare is not None:
                self._spare.kill()
                self._spare.wait()
            if self._file is not None:
                self._file.close()

    def _new(self) -> GrammarProcess:
        """Raises OSError."""
        if self._is_closed:
            raise OSError("the engine has stopped")
        self._file = self._file or self._vocabulary.file()
        return GrammarProcess(self._file)
