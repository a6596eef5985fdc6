"""A pool of grammar workers that a test speaks for, over real pairs of sockets."""

import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any

from engine.core.step import SequenceId
from engine.grammar.answers import MatcherAnswers, Trials
from engine.grammar.pool import GrammarPool
from engine.grammar.process import GrammarProcess, GrammarProcesses
from engine.grammar.state import LookAhead, Matcher
from engine.grammar.wire import JobReport, ReportKind, WireMessage, read_request, report_frame
from engine.process.sockets import FrameBuffer
from engine.values.request import Grammar, GrammarKind

LIMIT, CRASH, OUTSIDE = -signal.SIGPROF, -signal.SIGSEGV, -signal.SIGKILL
OUT_OF_MEMORY = -signal.SIGABRT
MEMORY = 1000
BITS = bytes([5, 0, 0, 0])
SECONDS = 60.0


class ScriptedProcess(GrammarProcess):
    """`peer` is its end. `footprint` is what macOS says of its memory."""

    def __init__(self) -> None:
        self.connection, self.peer = socket.socketpair()
        self.connection.setblocking(False)
        self._outbox = bytearray()
        self._frames, self._requests = FrameBuffer(), FrameBuffer()
        self._exit_code = OUTSIDE
        self.is_over = self.is_in_background = False
        self.is_awaited, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()
        self.footprint: int | None = None

    @property
    def is_running(self) -> bool:
        return not self.is_over

    def end(self) -> int:
        self.kill()
        return self.wait()

    def kill(self) -> None:
        self.connection.close()
        self.peer.close()
        self.is_over = True

    def wait(self) -> int:
        self.is_awaited.set()
        assert self.may_end.wait(SECONDS)
        return self._exit_code

    def yield_to_others(self) -> None:
        self.is_in_background = True

    def footprint_bytes(self) -> int | None:
        return self.footprint

    def die(self, exit_code: int = LIMIT) -> None:
        """What it has reported can still be read."""
        self.is_over = True
        self._exit_code = exit_code
        self.peer.close()

    def ready(self) -> None:
        self.report(JobReport(ReportKind.READY, bytes_left=MEMORY))

    def requests(self) -> list[WireMessage]:
        """What it has been sent since the last time."""
        self.peer.setblocking(False)
        bodies: list[bytes] = []
        with suppress(BlockingIOError):
            while data := self.peer.recv(1 << 20):
                bodies += self._requests.add(data)
        return [read_request(body) for body in bodies]

    def report(self, report: JobReport) -> None:
        self.peer.setblocking(True)
        self.peer.sendall(report_frame(report))

    def mask(self, job: WireMessage, n_tokens: int, seconds: float = 0.001, **fields: Any) -> None:
        """Answer a job with a mask."""
        fields = {"bytes_left": MEMORY, "mask": BITS, "seconds": seconds, **fields}
        self.report(JobReport(ReportKind.MASK, job["id"], n_tokens, **fields))

    def verdict(self, job: WireMessage, error: str = "", seconds: float = 0.001) -> None:
        """Answer a trial."""
        report = JobReport(
            ReportKind.VERDICT, job["id"], seconds=seconds, bytes_left=MEMORY, error=error
        )
        self.report(report)


class SameThread(Executor):
    """Runs what is submitted at once, so that a test knows when it is done."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Starts(GrammarProcesses):
    """Starts scripted processes, which are ready at once, as long as it may."""

    def __init__(self) -> None:
        self.started: list[ScriptedProcess] = []
        self.is_possible = self.are_ready = True
        self.may_start = threading.Event()
        self.may_start.set()
        self.threads: list[int] = []

    def start(self) -> GrammarProcess:
        self.threads.append(threading.get_ident())
        assert self.may_start.wait(SECONDS)
        if not self.is_possible:
            raise OSError("no more processes")
        process = ScriptedProcess()
        if self.are_ready:
            process.ready()
        self.started.append(process)
        return process

    def prepare(self) -> None: ...

    def close(self) -> None: ...


class Scene:
    """A pool whose turns a test takes, a clock that stands still, and what the pool is asked by."""

    def __init__(self, starter: Executor | None = None) -> None:
        self.now = 0.0
        self.starts = Starts()
        self.threads: list[Callable[[], None]] = []
        self.pool = GrammarPool(
            self.starts, 1, lambda: self.now, starter or SameThread(), self.threads.append
        )
        self.matchers: dict[int, Matcher] = {}  # of sequences that have not ended
        self.waited: list[float] = []
        self.answers = MatcherAnswers(self.pool, self.waited.append, lambda: self.now)
        self.trials = Trials(self.pool)

    def ask(self, sequence: int, client: str, matcher: Matcher) -> None:
        self.matchers[sequence] = matcher
        self.answers.ask(SequenceId(sequence), client, matcher)

    def look_ahead(self, sequence: int, client: str, matcher: Matcher, *draft: int) -> LookAhead:
        self.matchers[sequence] = matcher
        question = LookAhead(matcher, draft)
        self.answers.look_ahead(SequenceId(sequence), client, question)
        return question

    def end(self, *sequences: int) -> None:
        """These sequences end, or all."""
        for sequence in sequences or tuple(self.matchers):
            self.matchers.pop(sequence).end()

    def turn(self) -> None:
        """Send what was asked, take in what processes have said, and the answers."""
        self.pool.flush()
        for _ in ("what they have said", "their ends"):
            self.pool.turn(0.0)
        self.answers.wait(lambda: False, 0.0)

    def requests(self, process: int) -> list[WireMessage]:
        self.turn()
        return self.starts.started[process].requests()

    def process(self, number: int) -> ScriptedProcess:
        return self.starts.started[number]

    def job(self, process: int) -> WireMessage:
        """The only request that a process has been sent since the last time."""
        (job,) = self.requests(process)
        return job

    def opened(
        self, matcher: Matcher, *, sequence: int = 0, client: str = "a", process: int = 0
    ) -> WireMessage:
        """Ask for a matcher's mask. Returns the job that a process is sent for it."""
        self.ask(sequence, client, matcher)
        return self.job(process)

    def mask(
        self, process: int, job: WireMessage, n_tokens: int, *args: Any, **fields: Any
    ) -> None:
        """A process answers a job with a mask, and the pool takes a turn."""
        self.process(process).mask(job, n_tokens, *args, **fields)
        self.turn()

    def verdict(self, process: int, job: WireMessage, *args: Any, **fields: Any) -> None:
        """A process answers a trial, and the pool takes a turn."""
        self.process(process).verdict(job, *args, **fields)
        self.turn()

    def lose(self, process: int, exit_code: int = LIMIT) -> None:
        """It dies of the first job that it has not answered, and that is found out."""
        self.process(process).die(exit_code)
        self.turn()

    def close(self) -> None:
        self.pool.close()
        for run in self.threads:
            run()
        for process in self.starts.started:
            process.kill()


def matcher(trial_seconds: float = 0.0, tokens: tuple[int, ...] = (), text: str = "a") -> Matcher:
    return Matcher(Grammar(GrammarKind.REGEX, text), "regex", trial_seconds, list(tokens))
