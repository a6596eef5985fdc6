"""New grammars are tried in processes that may die, before a matcher of them is asked for."""

import asyncio
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from engine.api import EngineStopped, NoGrammars
from engine.grammar.remote.process import (
    ENDED_BY_OTHERS,
    START_SECONDS,
    GrammarProcess,
    patience_seconds,
)
from engine.grammar.remote.turns import ClientTurns, Closed
from engine.grammar.remote.wire import Report, Said, read_report, request_frame
from engine.process.sockets import FrameBuffer, ProtocolError, send_all
from engine.values.request import Grammar, GrammarKind

logger = logging.getLogger(__name__)

PROCESSES = 2
"""One is free for the next client while another's grammar takes all its time."""

TRIAL_SECONDS = 2.0
"""Of the processor, to compile a grammar and make its first masks. What people use takes a
hundredth of it."""

IDLE_SECONDS = 60.0
KEPT_VERDICTS = 4096

MAX_GRAMMAR_CHARACTERS = {
    GrammarKind.JSON_SCHEMA: 256 * 1024,
    GrammarKind.REGEX: 32 * 1024,
    GrammarKind.LARK: 32 * 1024,
}

WARM_UP = Grammar(GrammarKind.REGEX, "a")

TOO_COSTLY = (
    "the grammar is too costly: it cannot be compiled, and its first masks made, within "
    f"{TRIAL_SECONDS:g} s of processor time and 1 GiB of memory"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a grammar's trial: an error for the client, or the seconds that it took."""

    error: str | None
    seconds: float


def too_long(grammar: Grammar) -> Verdict | None:
    """The verdict on a grammar that is too long to be tried; None for the others."""
    n_characters, most = len(grammar.text), MAX_GRAMMAR_CHARACTERS[grammar.kind]
    if n_characters <= most:
        return None
    return Verdict(f"the grammar has {n_characters} characters; {most} are the most", 0.0)


@dataclass(frozen=True, slots=True)
class _Trial:
    grammar: Grammar
    verdict: Future[Verdict]


class Trials:
    """Safe from any thread. Threads and processes start with the first grammar."""

    def __init__(self, start_process: Callable[[], GrammarProcess]) -> None:
        self._start_process = start_process
        self._turns = ClientTurns[_Trial]()
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    async def of(self, client: str, grammars: Collection[Grammar]) -> dict[Grammar, Verdict]:
        """The verdict on each. Raises EngineStopped or NoGrammars."""
        return {grammar: await self._verdict(client, grammar) for grammar in grammars}

    def close(self) -> None:
        """Try nothing more. Processes end with their threads, or with the daemon."""
        for trial in self._turns.close():
            if trial.verdict.set_running_or_notify_cancel():
                trial.verdict.set_exception(EngineStopped("the engine has stopped"))

    async def _verdict(self, client: str, grammar: Grammar) -> Verdict:
        if (known := too_long(grammar) or self._known(grammar)) is not None:
            return known
        self._start_threads()
        trial = _Trial(grammar, Future())
        try:
            self._turns.add(client, trial)
        except Closed:
            raise EngineStopped("the engine has stopped") from None
        try:
            return await asyncio.wrap_future(trial.verdict)
        except asyncio.CancelledError:  # its client has gone
            self._turns.withdraw(trial)
            raise

    def _start_threads(self) -> None:
        with self._lock:
            while len(self._threads) < PROCESSES:
                name = f"grammar-trial-{len(self._threads)}"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self) -> None:
        booth = _Booth(self._start_process)
        with suppress(Closed):
            while True:
                turn = self._turns.take(IDLE_SECONDS)
                if turn is None:
                    booth.end()  # it takes memory
                    continue
                client, trial = turn
                try:
                    self._hold(trial, booth)
                finally:
                    self._turns.done(client)
        booth.end()

    def _hold(self, trial: _Trial, booth: "_Booth") -> None:
        if not trial.verdict.set_running_or_notify_cancel():
            return  # its client has gone
        try:
            verdict = self._known(trial.grammar) or booth.verdict(trial.grammar)
        except Exception as error:
            logger.exception("a grammar could not be tried")
            trial.verdict.set_exception(NoGrammars(f"no grammar can be read: {error}"))
            return
        self._keep(trial.grammar, verdict)
        trial.verdict.set_result(verdict)

    def _known(self, grammar: Grammar) -> Verdict | None:
        with self._lock:
            return self._verdicts.get(_digest(grammar))

    def _keep(self, grammar: Grammar, verdict: Verdict) -> None:
        with self._lock:
            self._verdicts[_digest(grammar)] = verdict
            if len(self._verdicts) > KEPT_VERDICTS:
                self._verdicts.popitem(last=False)


class _Booth:
    """One thread's process, which is started when there is a trial and again when it has died."""

    def __init__(self, start_process: Callable[[], GrammarProcess]) -> None:
        self._start_process = start_process
        self._process: GrammarProcess | None = None
        self._frames = FrameBuffer()

    def verdict(self, grammar: Grammar) -> Verdict:
        """Raises OSError where no process can be started, ProtocolError where it makes no sense."""
        process = self._ready()
        try:
            process.connection.settimeout(patience_seconds(TRIAL_SECONDS))
            send_all(process.connection, _trial(grammar))
            return self._verdict(process)
        except TimeoutError:
            self.end()
            return Verdict(TOO_COSTLY, TRIAL_SECONDS)
        except (OSError, EOFError) as error:
            if self.end() == ENDED_BY_OTHERS:
                raise OSError("a grammar process was killed") from error
            return Verdict(TOO_COSTLY, TRIAL_SECONDS)
        except ProtocolError:
            self.end()
            raise

    def end(self) -> int | None:
        """Its exit code, where there was one."""
        process, self._process = self._process, None
        return None if process is None else process.end()

    def _ready(self) -> GrammarProcess:
        """A process that has compiled something already, so that what ends it is the grammar."""
        if self._process is not None and not self._process.is_running:
            self.end()  # it has been killed while it had nothing to do
        if self._process is None:
            self._process = process = self._start_process()
            self._frames = FrameBuffer()
            process.connection.settimeout(START_SECONDS)
            try:
                send_all(process.connection, _trial(WARM_UP))
                self._verdict(process)
            except (OSError, EOFError, ProtocolError) as error:
                self.end()
                raise OSError(f"a grammar process does not start: {error!r}") from error
        return self._process

    def _verdict(self, process: GrammarProcess) -> Verdict:
        """Raises OSError, EOFError or ProtocolError."""
        bodies: list[bytes] = []
        while not bodies:
            data = process.connection.recv(65536)
            if not data:
                raise EOFError
            bodies = self._frames.add(data)
        match read_report(bodies[0]):
            case Report(Said.VERDICT, {"error": str() | None as error, "seconds": float(seconds)}):
                return Verdict(error, seconds)
        raise ProtocolError("not a verdict")


def _trial(grammar: Grammar) -> bytes:
    job = {"do": "try", "client": "", "kind": grammar.kind, "text": grammar.text}
    return request_frame({**job, "seconds": TRIAL_SECONDS})


def _digest(grammar: Grammar) -> bytes:
    return hashlib.blake2b(
        f"{grammar.kind} {grammar.text}".encode("utf-8", "surrogatepass")
    ).digest()
