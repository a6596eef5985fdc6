"""The pool of worker processes that read grammars. `queue` assigns their jobs.

A matcher is a function of its grammar and its tokens. So when a worker dies, its matchers are
opened elsewhere when they are next needed. The job at fault runs once more, after the others and in
a worker of its own; the second time it is refused.
"""

import logging
import math
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from time import monotonic

from engine.grammar.process import ENDED_BY_OTHERS, GrammarProcess, GrammarProcesses
from engine.grammar.queue import (
    SHORT_LIMIT_SECONDS,
    SHORT_SECONDS,
    JobQueue,
    Loss,
    Session,
    WorkerSlot,
    patience_seconds,
)
from engine.grammar.state import LookAhead
from engine.grammar.wire import MEMORY_BYTES, JobReport, ReportKind, WireMessage
from engine.process.sockets import ProtocolError

logger = logging.getLogger(__name__)

MOST_FRUITLESS = 3
"""Deaths in a row that are no job's fault, without a report: then grammars do not end workers."""

START_SECONDS = 60.0
"""Wall time until a worker is ready."""

IDLE_SECONDS = 60.0
"""After this time a worker that has no matchers ends, since it takes memory."""

TICK_SECONDS = 0.05
"""For how long the pool's thread waits for more work before it sleeps: to wake it takes a system
call. On macOS also the time between two looks at the memory of a worker that has a job.
"""

RETRY_SECONDS = 0.005
"""Between two looks at a worker whose socket is full. A kernel without buffers calls a socket
writable that takes nothing, so waiting for that would turn without end."""


class _Unfit(Exception):
    """The process has to be ended, or could not be started. `cause` stands for its exit code."""

    def __init__(self, reason: str, cause: int) -> None:
        super().__init__(reason)
        self.cause = cause


def _run_on_thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="grammar-pool", daemon=True).start()


class GrammarPool:
    """Safe from any thread. Its own thread, and processes, start with the first session.

    Jobs are sent on the thread that submits them, reports are read on the pool's own. Processes
    start on a third, so no job waits for a start.
    """

    def __init__(
        self,
        processes: GrammarProcesses,
        n_words: int,
        clock: Callable[[], float] = monotonic,
        starter: Executor | None = None,
        run_on_thread: Callable[[Callable[[], None]], None] = _run_on_thread,
    ) -> None:
        """Masks have `n_words` of 32 tokens. Processes start on a thread of the `starter`."""
        self.n_words = n_words
        self._processes = processes
        self._starter = starter or ThreadPoolExecutor(1, thread_name_prefix="grammar-starter")
        self._clock = clock
        self._run_on_thread = run_on_thread
        self._lock = threading.RLock()
        self._queue = JobQueue()
        self._workers, self._waiting = self._queue.workers, self._queue.waiting
        self._numbers = count(1)
        # Whose exit codes are awaited, and their places.
        self._ended: list[tuple[WorkerSlot, int]] = []
        self._n_fruitless = 0
        self._has_begun = self._is_closed = self._is_used = False
        self._sleeps_until = -math.inf  # of the clock, while the pool's thread sleeps
        self._wakes: tuple[socket.socket, socket.socket] | None = None

    def submit(self, session: Session) -> None:
        """Queue a trial, or a matcher for an answer on its tokens. `flush` sends what may run."""
        with self._lock:
            if self._is_closed:
                session.done(Loss.STOPPED, session.draft)
                return
            session.number = session.number or next(self._numbers)
            self._is_used = True
            self._queue.add(session)
            self._begin()

    def ask(self, session: Session, tokens: list[int], draft: LookAhead | None = None) -> None:
        """Give a matcher more tokens, and perhaps a draft to follow after them."""
        with self._lock:
            session.tokens += tokens
            session.draft = draft
            self.submit(session)

    def withdraw(self, session: Session) -> None:
        """Forget a session. `done` is called no more, but for a trial that runs."""
        with self._lock:
            self._waiting.pop(session, None)
            if session.is_trial and session.job is not None:
                return
            if session.job is not None:
                session.job.is_wanted, session.job = False, None
            for worker in self._workers:
                if worker.kept_for is session:
                    worker.kept_for = None
            self._leave(session)

    def flush(self) -> None:
        """Send what may run now."""
        with self._lock:
            self._dispatch()
            seconds = self._rest_seconds()
            must_wake = seconds is not None and self._clock() + seconds < self._sleeps_until
        if must_wake:
            self._wake()

    def turn(self, most_seconds: float | None = None) -> None:
        """Wait for a report or for the next check of running jobs, and process it. On the pool's
        thread.
        """
        poller = select.poll()
        with self._lock:
            for worker in self._workers:
                if worker.process is not None:
                    poller.register(worker.process.connection, select.POLLIN)
            if self._wakes is not None:
                poller.register(self._wakes[0], select.POLLIN)
            seconds = self._rest_seconds()
            if self._is_used:
                seconds = TICK_SECONDS if seconds is None else min(seconds, TICK_SECONDS)
            self._is_used = False
            self._sleeps_until = math.inf if seconds is None else self._clock() + seconds
        if most_seconds is not None:
            seconds = most_seconds if seconds is None else min(seconds, most_seconds)
        poller.poll(None if seconds is None else 1e3 * seconds)
        with self._lock:
            self._sleeps_until = -math.inf
            if self._wakes is not None:
                with suppress(BlockingIOError):
                    self._wakes[0].recv(1024)
            self._exchange()
        for worker, place in tuple(self._ended):
            assert worker.process is not None
            exit_code = worker.process.wait()
            with self._lock:
                if (worker, place) in self._ended:
                    self._ended.remove((worker, place))
                    self._lose(worker, place, "it has died", exit_code)
                    self._dispatch()

    def close(self) -> None:
        """End all processes. What waits is lost."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for session in self._clear():
                session.done(Loss.STOPPED, session.draft)
            self._wake()
        self._starter.shutdown(wait=False)
        self._processes.close()

    # The pool's thread

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._wakes = socket.socketpair()
            for end in self._wakes:
                end.setblocking(False)
            self._run_on_thread(self._run)

    def _run(self) -> None:
        """The pool's thread. If it fails, what was asked for has no answer, and the next session
        starts another thread, with new processes.
        """
        wakes = self._wakes or ()
        try:
            while not self._is_closed:
                self.turn()
        except Exception:
            logger.critical("the thread of the grammar workers has died", exc_info=True)
            with self._lock:
                self._has_begun, self._wakes = self._is_closed, None
                for session in self._clear():
                    self._forget(session, Loss.NO_WORKER)
        finally:
            for end in wakes:
                end.close()

    def _clear(self) -> list[Session]:
        """End all processes, and empty the queue. Returns the sessions that wait for a report."""
        workers = [*self._workers, *(worker for worker, _ in self._ended)]
        running = [job.session for one in workers for job in one.jobs if job.is_wanted]
        lost = [*running, *self._waiting]
        self._waiting.clear()
        self._ended.clear()
        for worker in tuple(self._workers):
            self._vacate(worker)
        return lost

    def _wake(self) -> None:
        if (wakes := self._wakes) is not None:
            with suppress(OSError):  # it is full: the thread wakes anyway
                wakes[1].send(b"\0")

    def _rest_seconds(self) -> float | None:
        """The time until the next check, if no process reports; None if there is nothing to check
        until then.
        """
        if any(worker.process and not worker.process.flush() for worker in self._workers):
            return RETRY_SECONDS
        now = self._clock()
        due = [one.since + at for one in self._workers for at in self._checks(one, now)]
        return max(min(due) - now, 0.0) if due else None

    def _checks(self, worker: WorkerSlot, now: float) -> Iterator[float]:
        """When `_look_at` has something to do, if no process reports: in seconds after `since`."""
        seconds = now - worker.since
        if worker.process is None or not worker.is_ready:
            if not worker.is_empty:
                yield START_SECONDS
        elif not worker.jobs:
            if self._is_spare(worker):
                yield IDLE_SECONDS
        else:
            yield patience_seconds(worker.jobs[0].limit_seconds)
            if worker.process.footprint_bytes() is not None:
                yield seconds + TICK_SECONDS
            if worker is not self._workers[0]:
                yield from (at for at in (SHORT_SECONDS, SHORT_LIMIT_SECONDS) if seconds <= at)

    def _is_spare(self, worker: WorkerSlot) -> bool:
        """Whether a worker that has no jobs is to end after IDLE_SECONDS."""
        is_last = sum(one.is_ready for one in self._workers) == 1
        return not worker.sessions and (worker.in_background or not is_last)

    def _exchange(self) -> None:
        """Take in what all processes have sent, then send what may run now."""
        if self._is_closed:
            return
        for place, worker in enumerate(tuple(self._workers)):
            try:
                self._take_started(worker)
                if worker.process is not None:
                    for report in worker.process.receive():
                        self._take(worker, report)
                self._look_at(worker)
            except EOFError:
                self._vacate(worker, is_reaped=False)
                self._ended.append((worker, place))
            except ProtocolError as error:
                self._vacate(worker)
                self._lose(worker, place, str(error), ENDED_BY_OTHERS)
            except _Unfit as unfit:
                self._vacate(worker)
                self._lose(worker, place, str(unfit), unfit.cause)
        self._dispatch()

    def _take_started(self, worker: WorkerSlot) -> None:
        """Take over a process that has started by now. Raises _Unfit."""
        if worker.starting is not None and worker.starting.done():
            starting, worker.starting = worker.starting, None
            if (error := starting.exception()) is not None:
                raise _Unfit(str(error), ENDED_BY_OTHERS)
            worker.process = starting.result()

    def _look_at(self, worker: WorkerSlot) -> None:
        """Check a process: end it if it starts or works for too long, takes too much memory, or is
        not needed. Raises _Unfit.
        """
        seconds = self._clock() - worker.since
        if not worker.is_ready:
            if not worker.is_empty and seconds > START_SECONDS:
                raise _Unfit("it does not start", ENDED_BY_OTHERS)
            return
        assert worker.process is not None
        if not worker.jobs:
            if seconds > IDLE_SECONDS and self._is_spare(worker):
                self._vacate(worker)
        elif (worker.process.footprint_bytes() or 0) > MEMORY_BYTES:
            raise _Unfit("it takes too much memory", -signal.SIGABRT)
        elif seconds > patience_seconds(worker.jobs[0].limit_seconds):
            raise _Unfit("it is stuck", -signal.SIGALRM)
        elif worker is not self._workers[0]:
            if seconds > SHORT_SECONDS:
                self._take_back(worker)
            if seconds > SHORT_LIMIT_SECONDS and not worker.in_background:
                worker.in_background = True
                worker.process.yield_to_others()

    def _take_back(self, worker: WorkerSlot) -> None:
        """Others need not wait for the job that runs: the first worker does theirs."""
        first, now = self._workers[0], self._clock()
        for job in list(worker.jobs)[1:]:
            session = job.session
            if job.is_wanted and self._queue.admits(first, session, now):
                job.is_wanted, session.job = False, None
                self._leave(session)
                self._queue.add(session)

    # Reports

    def _take(self, worker: WorkerSlot, report: JobReport) -> None:
        """Raises ProtocolError."""
        now = self._clock()
        if not worker.is_ready:
            if report.kind is not ReportKind.READY:
                raise ProtocolError("a report before it is ready")
            worker.is_ready, worker.since = True, now
            worker.first_bytes_left = worker.bytes_left = report.bytes_left
            return
        worker.check(report, 4 * self.n_words)
        job = worker.jobs.popleft()
        worker.since, self._n_fruitless = now, 0
        session = job.session
        self._queue.usage.add(session.client, report.seconds + report.draft_seconds, now)
        taken_bytes = max(0, worker.bytes_left - report.bytes_left)
        worker.bytes_left = report.bytes_left
        if not job.is_wanted:
            return
        session.job = None
        if not report.error:
            worker.remember(session.grammar)
        is_partial = report.kind is ReportKind.ADVANCED and report.n_tokens < job.n_tokens
        if worker.kept_for is session and not is_partial:
            worker.kept_for, session.runs_alone = None, False
        if session.is_trial:
            session.done(report, None)
            return
        worker.taken_bytes[session] += taken_bytes
        if not job.opens:
            session.slowest_seconds = max(session.slowest_seconds, report.seconds)
        session.n_accepted = report.n_tokens
        if report.kind is not ReportKind.ADVANCED:
            session.n_answered = report.n_tokens
        if is_partial:
            self._queue.add(session)  # the rest is for another turn
            return
        is_followed = job.draft is not None and session.draft is job.draft
        session.draft = None if is_followed else session.draft
        session.done(report, job.draft)
        has_more = report.n_tokens < len(session.tokens) and report.kind is not ReportKind.FAILED
        if session.worker is worker and (has_more or session.draft is not None):
            self._queue.add(session)

    # Deaths

    def _lose(self, worker: WorkerSlot, place: int, reason: str, cause: int) -> None:
        """The process of the worker that had this place has ended, or was ended. `cause` is its
        exit code, or stands for it where the daemon has ended it.
        """
        running = worker.jobs[0] if worker.jobs else None
        is_fruitless = running is not None or not worker.is_ready
        has_full_limit = place > 0
        logger.warning("a grammar process was lost: %s; exit code %s", reason, cause)
        for job in worker.jobs:
            if job.is_wanted:
                job.session.job = None
                self._queue.add(job.session)
        culprit = worker.culprit(cause)
        if running is None or culprit is None:
            self._n_fruitless += is_fruitless
            if self._n_fruitless >= MOST_FRUITLESS:
                self._give_up()
            return
        self._queue.usage.add(culprit.client, running.limit_seconds, self._clock())
        has_gone = culprit is running.session and not running.is_wanted
        if not has_gone:
            is_beyond_limit = cause == -signal.SIGPROF and has_full_limit and not running.draft
            self._charge(culprit, is_beyond_limit)

    def _charge(self, session: Session, is_beyond_limit: bool) -> None:
        """A worker has died of the session. If a draft may have been the reason, the session gets
        no more drafts; drafts refuse no request.
        """
        if is_beyond_limit:
            self._forget(session, Loss.TOO_COSTLY)
        elif session.has_drafted:
            session.has_drafted, session.draft = False, None
            session.done(Loss.DRAFT, None)
            if session.n_answered == len(session.tokens):
                self._waiting.pop(session, None)
        elif session.deaths:
            self._forget(session, Loss.TOO_COSTLY)
        else:
            session.deaths, session.runs_alone = 1, True

    def _give_up(self) -> None:
        for session in tuple(self._waiting):
            self._forget(session, Loss.NO_WORKER)

    def _forget(self, session: Session, loss: Loss) -> None:
        self.withdraw(session)
        session.done(loss, session.draft)

    def _vacate(self, worker: WorkerSlot, *, is_reaped: bool = True) -> None:
        """Kill the worker's process and put an empty place where it was. That the process has ended
        is waited for on the starter's thread, or by the caller: others need the lock.
        """
        self._workers[self._workers.index(worker)] = WorkerSlot()
        for session in worker.sessions:
            session.worker = None
        if worker.starting is not None and not worker.starting.cancel():
            worker.starting.add_done_callback(_kill_started)
        if worker.process is not None:
            worker.process.kill()
            if is_reaped:
                self._starter.submit(worker.process.wait)

    # The queue

    def _dispatch(self) -> None:
        now = self._clock()
        for session in self._queue.in_order(now):
            worker = self._queue.place(session, now)
            if worker is not None and session.runs_alone and worker.kept_for is not session:
                worker = self._keep(worker, session)
            if worker is None:
                continue
            if worker.is_empty:
                self._start(worker, now)
            elif worker.is_ready:
                self._send(worker, session, now)
        for worker in self._workers:
            if worker.process is not None:
                worker.process.flush()

    def _keep(self, worker: WorkerSlot, session: Session) -> WorkerSlot:
        """Keep the worker for the session alone, with a new process unless its own is unused."""
        if worker.has_worked:
            at = self._workers.index(worker)
            self._vacate(worker)
            worker = self._workers[at]
        worker.kept_for = session
        return worker

    def _start(self, worker: WorkerSlot, now: float) -> None:
        worker.since = now
        worker.starting = self._starter.submit(self._processes.start)
        worker.starting.add_done_callback(lambda starting: self._wake())
        self._starter.submit(self._processes.prepare)

    def _send(self, worker: WorkerSlot, session: Session, now: float) -> None:
        assert worker.process is not None
        job = self._queue.take(session, worker, now)
        message: WireMessage = {"id": session.number, "seconds": job.limit_seconds}
        if job.opens:
            message |= {"kind": session.grammar.kind, "text": session.grammar.text}
        if session.is_trial:
            worker.process.send({**message, "do": "try"})
            return
        if job.opens:
            self._leave(session)
            worker.sessions.add(session)
            session.worker, session.n_accepted = worker, 0
        tokens = session.tokens[session.n_accepted :]
        draft = () if session.draft is None else session.draft.tokens
        session.has_drafted |= session.draft is not None
        worker.process.send({**message, "do": "advance", "tokens": tokens, "draft": draft})

    def _leave(self, session: Session) -> None:
        """Close the session's matcher in the worker that has it."""
        worker, session.worker = session.worker, None
        if worker is not None and worker.process is not None:
            worker.sessions.discard(session)
            worker.taken_bytes.pop(session, None)
            worker.process.send({"do": "close", "id": session.number})
            worker.process.flush()


def _kill_started(starting: "Future[GrammarProcess]") -> None:
    """End a process that is no longer wanted once it has started."""
    if starting.exception() is None:
        starting.result().kill()
        starting.result().wait()
