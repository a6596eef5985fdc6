"""The engine's questions to its pool of grammar workers: verdicts on new grammars, and masks."""

import asyncio
import hashlib
import math
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic

import numpy as np

from engine.api import EngineStopped, NoGrammars
from engine.core.step import SequenceId
from engine.grammar.pool import GrammarPool
from engine.grammar.queue import TRIAL_SECONDS, Loss, Outcome, Session
from engine.grammar.state import (
    Allowed,
    Answer,
    Complete,
    LookAhead,
    Matcher,
    Refused,
    Unanswerable,
)
from engine.grammar.wire import JobReport, ReportKind
from engine.values.request import Grammar

ALLOWED_SECONDS = 2.0
ALLOWED_SECONDS_A_TOKEN = 0.02
"""Processor time for all masks of a sequence together. Its drafts may take as much; after that no
more of them are followed."""

KEPT_VERDICTS = 4096

TRIAL_TOO_COSTLY = (
    "the grammar is too costly: it cannot be compiled, and its first masks made, within "
    f"{TRIAL_SECONDS:g} s of processor time and 1 GiB of memory"
)
TOO_COSTLY = "the grammar is too costly: computing the allowed tokens takes too much time or memory"
NOBODY_ANSWERS = Unanswerable(
    "the process that reads grammars does not start, or is ended from outside"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a grammar's trial: an error for the client, or the seconds that it took."""

    error: str | None
    seconds: float


def too_long(grammar: Grammar) -> Verdict | None:
    """The verdict on a grammar that is too long to be tried; None for the others."""
    problem = grammar.too_long
    return None if problem is None else Verdict(problem, 0.0)


class Trials:
    """Tries new grammars before their matchers are opened, and keeps the KEPT_VERDICTS verdicts
    that were used last. Safe from any thread.
    """

    def __init__(self, pool: GrammarPool) -> None:
        self._pool = pool
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._waiting = defaultdict[bytes, dict[Session, Future[Verdict]]](dict)
        self._lock = threading.Lock()  # never held while the pool is called

    async def of(self, client: str, grammars: Collection[Grammar]) -> dict[Grammar, Verdict]:
        """The verdict on each. Raises EngineStopped or NoGrammars."""
        return {grammar: await self._verdict(client, grammar) for grammar in grammars}

    async def _verdict(self, client: str, grammar: Grammar) -> Verdict:
        digest, verdict = _digest(grammar), Future[Verdict]()
        session = Session(client, grammar, lambda outcome, _: self._take(digest, outcome), True)
        with self._lock:
            known = too_long(grammar) or self._verdicts.get(digest)
            if known is not None:
                if digest in self._verdicts:
                    self._verdicts.move_to_end(digest)
                return known
            self._waiting[digest][session] = verdict
        self._pool.submit(session)
        self._pool.flush()
        try:
            return await asyncio.wrap_future(verdict)
        except asyncio.CancelledError:  # its client has gone
            with self._lock:
                self._waiting[digest].pop(session, None)
                if not self._waiting[digest]:
                    del self._waiting[digest]
            self._pool.withdraw(session)
            raise

    def _take(self, digest: bytes, outcome: Outcome) -> None:
        """Keep the verdict, and give it to all requests that wait for it."""
        verdict: Verdict | Exception
        match outcome:
            case JobReport(error=error, seconds=seconds):
                verdict = Verdict(error or None, seconds)
            case Loss.TOO_COSTLY:
                verdict = Verdict(TRIAL_TOO_COSTLY, TRIAL_SECONDS)
            case Loss.STOPPED:
                verdict = EngineStopped("the engine has stopped")
            case _:
                verdict = NoGrammars("no grammar can be read: its process does not start or stay")
        with self._lock:
            waiting = self._waiting.pop(digest, {})
            if isinstance(verdict, Verdict):
                self._verdicts[digest] = verdict
                self._verdicts.move_to_end(digest)
                if len(self._verdicts) > KEPT_VERDICTS:
                    self._verdicts.popitem(last=False)
        for session, future in waiting.items():
            self._pool.withdraw(session)
            if not future.set_running_or_notify_cancel():
                continue
            if isinstance(verdict, Verdict):
                future.set_result(verdict)
            else:
                future.set_exception(verdict)


def _digest(grammar: Grammar) -> bytes:
    text = f"{grammar.kind} {grammar.text}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text).digest()


@dataclass(eq=False, slots=True)
class _SequenceMatcher:
    """A sequence's matcher and its session in the pool. The last draft that was asked about is
    `drafted`.
    """

    matcher: Matcher
    session: Session
    asked: float
    is_opening: bool = True
    drafted: LookAhead | None = None


class MatcherAnswers:
    """Answers the matchers of an engine's sequences. Engine thread only."""

    def __init__(
        self,
        pool: GrammarPool,
        observe: Callable[[float], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`observe` is called with the seconds that each answer took."""
        self.n_words = pool.n_words  # the length of a mask, in words of 32 tokens
        self._pool = pool
        self._observe = observe
        self._clock = clock
        self._matchers: dict[SequenceId, _SequenceMatcher] = {}
        self._arrived: SimpleQueue[tuple[SequenceId, Session, Outcome, LookAhead | None]] = (
            SimpleQueue()
        )

    def ask(self, sequence: SequenceId, client: str, matcher: Matcher) -> None:
        """Ask for the answer of the sequence's present matcher. Asking again changes nothing. The
        matcher is forgotten when it ends.
        """
        one = self._matchers.get(sequence)
        if one is not None and one.matcher is not matcher:
            self._drop(sequence)
            one = None
        if matcher.refusal is not None:
            matcher.answer = matcher.refusal
        elif one is None:
            self._open(sequence, client, matcher)
        elif (n_tokens := len(one.session.tokens)) < len(matcher.tokens):
            self._pool.ask(one.session, matcher.tokens[n_tokens:])
            _give_up(one.drafted)
            one.asked, one.is_opening = self._clock(), False

    def look_ahead(self, sequence: SequenceId, client: str, question: LookAhead) -> None:
        """Ask for the masks along a draft, and for its matcher's answer. Another draft of the
        sequence is followed no more.
        """
        matcher = question.matcher
        self.ask(sequence, client, matcher)
        one = self._matchers.get(sequence)
        is_done = isinstance(matcher.answer, Complete | Refused | Unanswerable)
        if one is None or is_done or not question.tokens or _is_spent(matcher):
            question.answers = ()
            return
        _give_up(one.drafted)
        one.drafted = question
        self._pool.ask(one.session, [], question)

    def wait(self, is_enough: Callable[[], bool], seconds: float) -> None:
        """Send the questions and receive answers, until there are enough or `seconds` have
        passed.
        """
        self._pool.flush()
        deadline = self._clock() + seconds
        while True:
            while not self._arrived.empty():
                self._take(*self._arrived.get())
            left_seconds = deadline - self._clock()
            if is_enough() or left_seconds <= 0:
                return
            try:
                self._take(*self._arrived.get(timeout=left_seconds))
            except Empty:
                return

    def close(self) -> None:
        """End the pool."""
        self._pool.close()

    def _open(self, sequence: SequenceId, client: str, matcher: Matcher) -> None:
        def arrived(outcome: Outcome, draft: LookAhead | None) -> None:
            self._arrived.put((sequence, session, outcome, draft))

        session = Session(
            client,
            matcher.grammar,
            arrived,
            trial_seconds=matcher.trial_seconds,
            tokens=list(matcher.tokens),
        )
        matcher.when_ended = partial(self._end, sequence, session)
        self._matchers[sequence] = _SequenceMatcher(matcher, session, self._clock())
        self._pool.submit(session)

    def _end(self, sequence: SequenceId, session: Session) -> None:
        one = self._matchers.get(sequence)
        if one is not None and one.session is session:
            self._drop(sequence)

    def _drop(self, sequence: SequenceId) -> None:
        one = self._matchers.pop(sequence)
        self._pool.withdraw(one.session)
        _give_up(one.drafted)

    def _take(
        self, sequence: SequenceId, session: Session, outcome: Outcome, draft: LookAhead | None
    ) -> None:
        one = self._matchers.get(sequence)
        if one is None or one.session is not session:
            return  # it is over
        match outcome:
            case JobReport():
                self._take_report(one, outcome, draft)
            case Loss.DRAFT:
                one.matcher.draft_seconds = math.inf
                _give_up(one.drafted)
            case Loss.TOO_COSTLY:
                one.matcher.refusal = Refused(TOO_COSTLY)
                one.matcher.answer = one.matcher.answer or one.matcher.refusal
                self._drop(sequence)
            case Loss.NO_WORKER | Loss.STOPPED:
                one.matcher.answer = one.matcher.answer or NOBODY_ANSWERS
                self._drop(sequence)

    def _take_report(
        self, one: _SequenceMatcher, report: JobReport, draft: LookAhead | None
    ) -> None:
        matcher = one.matcher
        if draft is not None:
            masks = np.frombuffer(report.draft_masks, dtype=np.int32).reshape(-1, self.n_words)
            ends = (Complete(),) if report.is_draft_complete else ()
            draft.answers = (
                (*map(Allowed, masks), *ends) if draft.answers is None else draft.answers
            )
            matcher.draft_seconds += report.draft_seconds
        is_present = report.n_tokens == len(matcher.tokens) or report.kind is ReportKind.FAILED
        if report.kind is ReportKind.ADVANCED or not is_present or matcher.answer is not None:
            return  # an answer stays: a step may have chosen from it
        self._observe(self._clock() - one.asked)
        if not one.is_opening:
            matcher.seconds += report.seconds
        is_costly = matcher.seconds > _allowed_seconds(matcher)
        matcher.answer = Refused(TOO_COSTLY) if is_costly else _answer(report)


def _answer(report: JobReport) -> Answer:
    match report.kind:
        case ReportKind.MASK:
            return Allowed(np.frombuffer(report.mask, dtype=np.int32), report.forced)
        case ReportKind.COMPLETE:
            return Complete()
        case _:
            return Refused(report.error)


def _allowed_seconds(matcher: Matcher) -> float:
    return ALLOWED_SECONDS + ALLOWED_SECONDS_A_TOKEN * len(matcher.tokens)


def _is_spent(matcher: Matcher) -> bool:
    """Whether no more of its drafts are followed."""
    return matcher.draft_seconds > _allowed_seconds(matcher)


def _give_up(question: LookAhead | None) -> None:
    """The draft is followed no more: there are no masks along it."""
    if question is not None and question.answers is None:
        question.answers = ()
