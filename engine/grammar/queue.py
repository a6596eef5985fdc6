"""The queue of all that is wanted of grammars: which job is next, and which worker does it.

A grammar is tried, its matcher is opened, given tokens and followed along a draft: each is a job
that advances a matcher and returns masks. Among jobs that wait, the one whose client has used the
least processor time in the last minute is next.

- The first worker takes only jobs that are predicted to be short, and gives them little time. So
  two costly grammars on the others do not keep short jobs waiting.
- A matcher is opened in the worker that compiled its grammar when it was tried. It moves to the
  first worker if a long job keeps it waiting and it is short itself.
"""

import signal
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count
from typing import TypeAlias

from engine.grammar.process import ENDED_BY_OTHERS, GrammarProcess
from engine.grammar.state import LookAhead
from engine.grammar.wire import EXCEPTION_EXIT, JobReport, ReportKind
from engine.process.sockets import ProtocolError
from engine.values.request import Grammar

WORKERS = 3
"""One for short jobs, and two: a costly grammar of one client leaves one to the others."""

SHORT_SECONDS = 0.05
"""Processor time of a job that others may wait for. Most take a thousandth of it."""

SHORT_LIMIT_SECONDS = 0.2
"""Processor time that a job may take in the first worker. One that takes more ends it, and is done
again elsewhere."""

STEP_SECONDS = 0.5
"""Processor time that tokens, the mask after them and masks along a draft may take elsewhere."""

TRIAL_SECONDS = 2.0
"""Processor time to compile a grammar and make its first masks. Usual grammars take a hundredth
of it.
"""

HOPEFUL_CHARACTERS = 32 * 1024
"""A new grammar up to this length may be tried in the first worker if the others are busy. A JSON
schema of this length took 30 ms, one of 120,000 took 180 ms (EPYC, 1,024 tokens)."""

PIPELINED_JOBS = 32
"""Short jobs that a worker has at a time, so that it need not wait for the next."""

STUCK_SECONDS = 30.0
"""Wall time for any job, in addition to its processor time on a busy machine."""

BUSY_FACTOR = 30.0
"""Wall time per processor time on a busy machine: three times the factor of a worker's niceness."""

OUT_OF_MEMORY = frozenset({-signal.SIGABRT, EXCEPTION_EXIT})
"""Exit codes of Rust and of Python where there is no memory left."""


USAGE_SECONDS = 60
"""For how long a client's processor time counts, and for how long a client with a job that was not
short is kept out of the first worker."""

KEPT_GRAMMARS = 128
"""Grammars that a worker is remembered for. It keeps about as many."""


class Loss(Enum):
    """Why there is no report."""

    TOO_COSTLY = auto()  # the session has ended a worker twice, or met its full limit
    DRAFT = auto()  # the draft has ended a worker: none may be followed after it
    NO_WORKER = auto()  # workers do not start, or are ended from outside
    STOPPED = auto()  # the engine has stopped


Outcome: TypeAlias = JobReport | Loss


@dataclass(eq=False, slots=True)
class Session:
    """A grammar's trial, or a sequence's matcher, as a client's work for the pool.

    `done` is called with each report or loss, and with the draft that was followed. It is called on
    any thread, within the pool's lock: it must return at once. `trial_seconds` is what the trial of
    the grammar took. The fields after `draft` are the pool's.
    """

    client: str
    grammar: Grammar
    done: Callable[[Outcome, LookAhead | None], None]
    is_trial: bool = False
    trial_seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)
    draft: LookAhead | None = None

    number: int = 0
    arrival: int = 0
    worker: "WorkerSlot | None" = None  # that has its matcher open
    n_accepted: int = 0  # tokens that the matcher there has been given
    n_answered: int = -1  # tokens that the last answer was about
    job: "Job | None" = None  # that a worker does for it
    slowest_seconds: float = 0.0
    deaths: int = 0
    runs_alone: bool = False
    has_drafted: bool = False


@dataclass(eq=False, slots=True)
class Job:
    """A job that was sent to a worker. Its report is dropped unless the job `is_wanted`."""

    session: Session
    opens: bool
    is_short: bool
    limit_seconds: float
    n_tokens: int
    draft: LookAhead | None
    is_wanted: bool = True


@dataclass(eq=False, slots=True)
class WorkerSlot:
    """A place for a worker process: empty, starting, or ready. `since` is when it began to start,
    to do the first of its `jobs`, or to have nothing to do.
    """

    starting: "Future[GrammarProcess] | None" = None
    process: GrammarProcess | None = None
    is_ready: bool = False
    has_worked: bool = False
    in_background: bool = False
    kept_for: Session | None = None  # which runs alone
    jobs: deque[Job] = field(default_factory=deque)
    since: float = 0.0
    sessions: set[Session] = field(default_factory=set)
    grammars: OrderedDict[Grammar, None] = field(default_factory=OrderedDict)
    first_bytes_left: int = 0
    bytes_left: int = 0
    taken_bytes: Counter[Session] = field(default_factory=Counter)

    @property
    def is_empty(self) -> bool:
        return self.process is None and self.starting is None

    def check(self, report: JobReport, mask_bytes: int) -> None:
        """Raises ProtocolError if the report does not answer the first job."""
        if not self.jobs or report.number != self.jobs[0].session.number:
            raise ProtocolError("a report on no job")
        job, is_verdict = self.jobs[0], report.kind is ReportKind.VERDICT
        if is_verdict != job.session.is_trial or report.kind is ReportKind.READY:
            raise ProtocolError("a report that is no answer")
        if report.kind is ReportKind.MASK and len(report.mask) != mask_bytes:
            raise ProtocolError(f"a mask of {len(report.mask)} bytes")
        if len(report.draft_masks) % mask_bytes or max(report.forced, default=0) >= 8 * mask_bytes:
            raise ProtocolError("masks of another length, or tokens beyond it")
        is_whole = report.kind in {ReportKind.MASK, ReportKind.COMPLETE}
        if report.n_tokens > job.n_tokens or (is_whole and report.n_tokens < job.n_tokens):
            raise ProtocolError("a report on other tokens")

    def remember(self, grammar: Grammar) -> None:
        """Note that the worker has compiled the grammar."""
        self.grammars[grammar] = None
        self.grammars.move_to_end(grammar)
        if len(self.grammars) > KEPT_GRAMMARS:
            self.grammars.popitem(last=False)

    def culprit(self, cause: int) -> Session | None:
        """The session that has ended the process; None where none is at fault."""
        if not self.jobs or cause == ENDED_BY_OTHERS:
            return None
        return self.largest() if cause in OUT_OF_MEMORY else self.jobs[0].session

    def largest(self) -> Session | None:
        """The largest matcher of the client that uses most memory in this worker, where the running
        job ran out of it. None if closed matchers used most.
        """
        running = self.jobs[0].session
        taken = Counter({one: self.taken_bytes[one] for one in (running, *self.sessions)})
        taken[running] += self.bytes_left
        of_clients = Counter[str]()
        for session, n_bytes in taken.items():
            of_clients[session.client] += n_bytes
        if self.first_bytes_left - taken.total() > max(of_clients.values()):
            return None
        return max(taken, key=lambda one: (of_clients[one.client], taken[one]))


class ProcessorUsage:
    """The processor seconds of each client in the last USAGE_SECONDS, to a second, and the clients
    that had a job of more than SHORT_SECONDS in that time.
    """

    def __init__(self) -> None:
        self._by_second = deque[tuple[int, Counter[str]]]()
        self._totals = Counter[str]()
        self._slow_until: dict[str, float] = {}

    def add(self, client: str, seconds: float, now: float) -> None:
        self._expire(now)
        if not self._by_second or self._by_second[-1][0] != int(now):
            self._by_second.append((int(now), Counter()))
        self._by_second[-1][1][client] += seconds  # type: ignore[assignment]  # of floats
        self._totals[client] += seconds  # type: ignore[assignment]
        if seconds > SHORT_SECONDS:
            self._slow_until[client] = now + USAGE_SECONDS

    def seconds(self, client: str, now: float) -> float:
        self._expire(now)
        return self._totals[client]

    def is_slow(self, client: str, now: float) -> bool:
        self._expire(now)
        return client in self._slow_until

    def _expire(self, now: float) -> None:
        while self._by_second and self._by_second[0][0] < now - USAGE_SECONDS:
            _, old = self._by_second.popleft()
            for client, seconds in old.items():
                self._totals[client] -= seconds
                if self._totals[client] <= 1e-9:  # of rounding
                    del self._totals[client]
        if any(until <= now for until in self._slow_until.values()):
            self._slow_until = {c: until for c, until in self._slow_until.items() if until > now}


class JobQueue:
    """The sessions that wait for one of the `workers`. The first worker is for short jobs."""

    def __init__(self) -> None:
        self.workers = [WorkerSlot() for _ in range(WORKERS)]
        self.waiting: dict[Session, None] = {}
        self.usage = ProcessorUsage()
        self._arrivals = count()
        self._trial_waits = False  # for one of the other workers, before what is placed after it

    def add(self, session: Session) -> None:
        """Queue a session, unless a worker has a job of it: the pool adds it again after that."""
        if session.job is None and session not in self.waiting:
            session.arrival = next(self._arrivals)
            self.waiting[session] = None

    def in_order(self, now: float) -> list[Session]:
        """The sessions that wait, the next first. One that has ended a worker comes after the
        others for a while.
        """

        def price(session: Session) -> tuple[float, int]:
            used_seconds = self.usage.seconds(session.client, now)
            return used_seconds + USAGE_SECONDS * session.deaths, session.arrival

        self._trial_waits = False
        return sorted(self.waiting, key=price)

    def place(self, session: Session, now: float) -> WorkerSlot | None:
        """The worker that is to do the session's next job, if it can take it now; it may have to
        start first. None: the session waits.
        """
        if session.runs_alone:
            return self._place_alone(session)
        if session.is_trial:
            return self._place_trial(session, now)
        return self._place_matcher(session, now)

    def _place_matcher(self, session: Session, now: float) -> WorkerSlot | None:
        """The worker that has the matcher open or its grammar compiled; the first instead if a long
        job keeps a short one waiting there.
        """
        first, *others = self.workers
        homes = [session.worker] if session.worker else self.workers
        home = next((one for one in homes if self._is_home(one, session, now)), None)
        if home is not None:
            if self._takes(home, session, now):
                return home
            if home is first or not _is_stalled(home, now):
                return None
        if self.admits(first, session, now):
            return first if self._takes(first, session, now) else None
        if home is not None:
            return None
        idle = [one for one in others if not one.jobs and one.kept_for is None]
        return min(idle, key=lambda one: (len(one.sessions), one.is_empty), default=None)

    def _is_home(self, worker: WorkerSlot, session: Session, now: float) -> bool:
        """Whether the worker has the matcher open or its grammar compiled, and may continue it."""
        has_it = session.worker is worker or session.grammar in worker.grammars
        return has_it and self.admits(worker, session, now)

    def _place_trial(self, session: Session, now: float) -> WorkerSlot | None:
        """A client has one trial at a time. The first worker takes it if all others are busy."""
        running = [job.session for worker in self.workers for job in worker.jobs]
        if any(one.is_trial and one.client == session.client for one in running):
            return None
        first, *others = self.workers
        idle = [one for one in others if not one.jobs and one.kept_for is None]
        if idle:
            return min(idle, key=lambda one: (len(one.sessions), one.is_empty))
        is_hopeful = len(session.grammar.text) <= HOPEFUL_CHARACTERS
        is_free = not first.jobs and self.admits(first, session, now)
        self._trial_waits = not (is_hopeful and is_free)
        return None if self._trial_waits else first

    def _place_alone(self, session: Session) -> WorkerSlot | None:
        """The worker that is kept for the session, or one to keep for it: it must have done nothing
        before, so that nothing but the session can end it.
        """
        others = self.workers[1:]
        kept = next((one for one in others if one.kept_for is session), None)
        free = [one for one in others if not one.jobs and not one.starting and not one.kept_for]
        return kept or min(free, key=lambda one: (one.has_worked, len(one.sessions)), default=None)

    def admits(self, worker: WorkerSlot, session: Session, now: float) -> bool:
        """Whether the session's jobs may run there at all."""
        if worker is not self.workers[0]:
            return worker.kept_for is None
        is_slow = session.deaths > 0 or self.usage.is_slow(session.client, now)
        return not is_slow and _predicted_seconds(session, worker) <= SHORT_SECONDS

    def _takes(self, worker: WorkerSlot, session: Session, now: float) -> bool:
        """Whether it takes the session's job now, or will do so when it has started."""
        if not worker.is_ready or not worker.jobs:
            return True
        is_short = _predicted_seconds(session, worker) <= SHORT_SECONDS
        has_room = worker.jobs[-1].is_short and len(worker.jobs) < PIPELINED_JOBS
        is_held = self._trial_waits and worker is not self.workers[0]
        return is_short and has_room and not is_held and not _is_stalled(worker, now)

    def take(self, session: Session, worker: WorkerSlot, now: float) -> Job:
        """The session's next job is the worker's from now on."""
        opens = session.worker is not worker
        seconds = TRIAL_SECONDS if session.is_trial else STEP_SECONDS
        if worker is self.workers[0]:
            seconds = SHORT_LIMIT_SECONDS
        if opens:
            seconds += 2 * session.trial_seconds
        is_short = _predicted_seconds(session, worker) <= SHORT_SECONDS
        job = Job(
            session,
            opens,
            is_short and not session.is_trial and not session.runs_alone,
            seconds,
            len(session.tokens),
            session.draft,
        )
        del self.waiting[session]
        session.job = job
        worker.since = worker.since if worker.jobs else now
        worker.has_worked = True
        worker.jobs.append(job)
        return job


def patience_seconds(limit_seconds: float) -> float:
    """The wall time that a job may take. A longer one is stuck: a job that waits without computing
    never reaches its limit of processor time.
    """
    return STUCK_SECONDS + BUSY_FACTOR * limit_seconds


def _predicted_seconds(session: Session, worker: WorkerSlot) -> float:
    """Processor time of the session's next job there, as far as that is known."""
    has_grammar = session.worker is worker or session.grammar in worker.grammars
    return session.slowest_seconds + (0.0 if has_grammar else session.trial_seconds)


def _is_stalled(worker: WorkerSlot, now: float) -> bool:
    """Whether it is busy with a job that others should not wait for."""
    if not worker.jobs:
        return False
    is_long = not (worker.jobs[0].is_short or worker.jobs[0].session.is_trial)
    return is_long or now - worker.since > SHORT_SECONDS
