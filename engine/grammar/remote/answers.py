"""The engine thread's side of grammar processes: asks for masks, and takes in answers."""

import logging
import math
import select
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import Protocol

import numpy as np

from engine.core.step import SequenceId
from engine.grammar.matcher import (
    Allowed,
    Answer,
    Complete,
    LookAhead,
    Matcher,
    Refused,
    Unanswerable,
)
from engine.grammar.remote.jobs import Job
from engine.grammar.remote.lane import Lane, LaneLost
from engine.grammar.remote.process import GrammarProcess
from engine.grammar.remote.wire import Ahead, Answered, Mask, Message, Report, Said
from engine.process.sockets import ProtocolError

logger = logging.getLogger(__name__)

STEP_SECONDS = 0.5
"""Of the processor, for one token and the mask behind it. Most take a ten-thousandth of it."""

QUICK_SECONDS = 0.05
"""Clients whose masks take longer than this are served by the slow process for a while."""

QUICK_LIMIT_SECONDS = 0.2
"""Of the processor, for one turn of the quick process. A job that takes longer ends it, and is done
again by the slow one."""

ALLOWED_SECONDS = 2.0
ALLOWED_SECONDS_A_TOKEN = 0.02
"""Of the processor, for all masks of a sequence together; and as much for those along its drafts,
which are asked for no more when they have taken it.
"""

CHECK_SECONDS = 0.005
"""Between two looks at a process that starts, or whose socket is full. No event tells of either."""

MOST_STARTS = 3
"""In a row without an answer: then it is not the grammars that end the process."""

TOO_COSTLY = "the grammar is too costly: what may follow takes too much time or memory to find out"
NOBODY_ANSWERS = Unanswerable(
    "the process that reads grammars does not start, or is ended from outside"
)


class Answers(Protocol):
    """Answers matchers. Engine thread only. Masks have `n_words` of 32 tokens each."""

    @property
    def n_words(self) -> int: ...

    def ask(self, sequence: SequenceId, client: str, matcher: Matcher) -> None:
        """Ask for the answer of the sequence's present matcher. Asking again changes nothing."""
        ...

    def look_ahead(self, sequence: SequenceId, client: str, question: LookAhead) -> None:
        """Ask for the masks along a draft, and for its matcher's answer. What was asked along
        another draft of the sequence is answered no more.
        """
        ...

    def retain(self, is_live: Callable[[SequenceId], bool]) -> None:
        """Forget the matchers of sequences that are over."""
        ...

    def wait(self, is_enough: Callable[[], bool], seconds: float) -> None:
        """Take in answers until there are enough, for so long at most."""
        ...

    def close(self) -> None:
        """End the processes."""
        ...


SLOW_SECONDS = 60.0
"""How long a client is served by the slow process after its job has kept others waiting."""


class SlowClients:
    """Clients whose jobs have kept others waiting, for SLOW_SECONDS each."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}

    def __contains__(self, client: str) -> bool:
        return self._until.get(client, 0.0) > self._clock()

    def add(self, client: str) -> None:
        now = self._clock()
        self._until = {one: until for one, until in self._until.items() if until > now}
        self._until[client] = now + SLOW_SECONDS


@dataclass(eq=False, slots=True)
class _RemoteMatcher:
    """A sequence's matcher as a process has it. `number` is its id there, never used twice. The
    last question ahead of it is `drafted`, as number `draft`.
    """

    sequence: SequenceId
    client: str
    matcher: Matcher
    lane: Lane
    number: int
    asked: float
    n_told: int
    is_opening: bool = True
    draft: int = 0
    drafted: LookAhead | None = None


class RemoteAnswers:
    """Two processes: a quick one, and a slow one for clients that would keep others waiting.

    A matcher is a function of its grammar and its tokens. So when a process dies its matchers are
    made again in another. Only the one that has ended the slow process is refused.
    """

    def __init__(
        self,
        start_quick: Callable[[], GrammarProcess],
        start_slow: Callable[[], GrammarProcess],
        starter: Executor,
        n_words: int,
        observe: Callable[[float], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`observe` is called with the seconds that each answer took. Processes start on threads of
        the `starter`: that takes a while, and the engine thread never waits for it.
        """
        self.n_words = n_words
        self._clock = clock
        self._quick = Lane(start_quick, starter, QUICK_LIMIT_SECONDS, clock)
        self._slow = Lane(start_slow, starter, STEP_SECONDS, clock)
        self._observe = observe
        self._numbers = count(1)
        self._remotes: dict[SequenceId, _RemoteMatcher] = {}
        self._by_number: dict[int, _RemoteMatcher] = {}
        self._slow_clients = SlowClients(clock)

    def ask(self, sequence: SequenceId, client: str, matcher: Matcher) -> None:
        """See `Answers.ask`."""
        remote = self._remotes.get(sequence)
        if remote is not None and (remote.matcher is not matcher or self._must_move(remote)):
            self._drop(sequence)
            remote = None
        if matcher.refusal is not None:
            matcher.answer = matcher.refusal
        elif remote is None:
            self._open(sequence, client, matcher)
        elif remote.n_told < len(matcher.tokens):
            self._step(remote)

    def look_ahead(self, sequence: SequenceId, client: str, question: LookAhead) -> None:
        """See `Answers.look_ahead`."""
        matcher = question.matcher
        self.ask(sequence, client, matcher)
        remote = self._remotes.get(sequence)
        is_done = isinstance(matcher.answer, Complete | Refused | Unanswerable)
        if remote is None or is_done or not question.tokens or _is_spent(matcher):
            question.answers = ()
            return
        _give_up(remote.drafted)
        remote.draft, remote.drafted = next(self._numbers), question
        more = {"tokens": question.tokens, "question": remote.draft}
        self._post(remote, "ahead", remote.lane.job_seconds, more)

    def retain(self, is_live: Callable[[SequenceId], bool]) -> None:
        """See `Answers.retain`."""
        for sequence in [one for one in self._remotes if not is_live(one)]:
            self._drop(sequence)

    def wait(self, is_enough: Callable[[], bool], seconds: float) -> None:
        """See `Answers.wait`."""
        deadline = self._clock() + seconds
        while True:
            for lane in (self._quick, self._slow):
                self._exchange(lane)
            left = deadline - self._clock()
            if is_enough() or left <= 0:
                return
            self._sleep(left)

    def close(self) -> None:
        """See `Answers.close`."""
        for lane in (self._quick, self._slow):
            lane.stop()

    def _sleep(self, seconds: float) -> None:
        """Wait until a process has something to say, for at most that many seconds."""
        if self._quick.is_held_up or self._slow.is_held_up:
            seconds = min(seconds, CHECK_SECONDS)
        poll = select.poll()
        for lane in (self._quick, self._slow):
            if lane.connection is not None:
                poll.register(lane.connection, select.POLLIN)
        poll.poll(1e3 * seconds)

    def _must_move(self, remote: _RemoteMatcher) -> bool:
        """Whether it belongs in the slow process. None moves back: it may be slow again."""
        return remote.lane is self._quick and remote.client in self._slow_clients

    def _open(self, sequence: SequenceId, client: str, matcher: Matcher) -> None:
        number = next(self._numbers)
        is_slow = matcher.trial_seconds > QUICK_SECONDS or client in self._slow_clients
        lane = self._slow if is_slow else self._quick
        remote = _RemoteMatcher(
            sequence, client, matcher, lane, number, self._clock(), len(matcher.tokens)
        )
        self._remotes[sequence] = remote
        self._by_number[number] = remote
        seconds = lane.job_seconds + 2 * matcher.trial_seconds
        grammar = {"kind": matcher.grammar.kind, "text": matcher.grammar.text}
        self._post(remote, "open", seconds, {"tokens": matcher.tokens, **grammar})

    def _step(self, remote: _RemoteMatcher) -> None:
        tokens = remote.matcher.tokens[remote.n_told :]
        remote.n_told += len(tokens)
        remote.asked = self._clock()
        remote.is_opening = False
        self._post(remote, "step", remote.lane.job_seconds, {"tokens": tokens})

    def _post(self, remote: _RemoteMatcher, do: str, seconds: float, more: Message) -> None:
        job = {"do": do, "id": remote.number, "client": remote.client, "seconds": seconds}
        remote.lane.post({**job, **more})

    def _drop(self, sequence: SequenceId) -> None:
        remote = self._remotes.pop(sequence)
        del self._by_number[remote.number]
        remote.lane.close(remote.number)
        _give_up(remote.drafted)

    def _exchange(self, lane: Lane) -> None:
        try:
            for report in lane.exchange():
                self._take(report, lane)
        except LaneLost as loss:
            self._lose(lane, loss)
        except ProtocolError as error:
            self._lose(lane, lane.given_up(str(error)))

    def _take(self, report: Answered | Report, lane: Lane) -> None:
        """Raises ProtocolError."""
        match report:
            case Ahead():
                self._take_ahead(report, lane)
                return
            case Mask(number, n_tokens, seconds, forced, bits):
                if len(bits) != 4 * self.n_words or max(forced, default=0) >= 32 * self.n_words:
                    raise ProtocolError(f"a mask of {len(bits)} bytes, or tokens beyond it")
                answer: Answer = Allowed(np.frombuffer(bits, dtype=np.int32), forced)
            case Report(Said.STOPPED, fields):
                number, n_tokens, seconds = _numbers(fields)
                answer = Complete()
            case Report(Said.FAILED, {"error": str(error)} as fields):
                number, n_tokens, seconds = _numbers(fields)
                answer = Refused(error)
            case _:
                raise ProtocolError("a report that is no answer")
        lane.deaths = 0
        if (remote := self._remote(number, lane)) is None:
            return  # it is over, or has been made again elsewhere
        if n_tokens == len(remote.matcher.tokens):
            self._answer(remote, answer, seconds)
        self._notice(remote, seconds)

    def _take_ahead(self, ahead: Ahead, lane: Lane) -> None:
        """Raises ProtocolError."""
        if len(ahead.bits) % (4 * self.n_words):
            raise ProtocolError(f"masks of {len(ahead.bits)} bytes")
        masks = np.frombuffer(ahead.bits, dtype=np.int32).reshape(-1, self.n_words)
        lane.deaths = 0
        if (remote := self._remote(ahead.matcher, lane)) is None:
            return
        remote.matcher.draft_seconds += ahead.seconds
        if remote.drafted is not None and remote.draft == ahead.question:
            ends = (Complete(),) if ahead.is_complete else ()
            remote.drafted.answers = (*map(Allowed, masks), *ends)
        self._notice(remote, ahead.seconds)

    def _notice(self, remote: _RemoteMatcher, seconds: float) -> None:
        """How long others have waited for an answer on this matcher."""
        if seconds > QUICK_SECONDS and remote.lane is self._quick:
            self._slow_down(remote.client)

    def _remote(self, number: int, lane: Lane) -> _RemoteMatcher | None:
        remote = self._by_number.get(number)
        return remote if remote is not None and remote.lane is lane else None

    def _answer(self, remote: _RemoteMatcher, answer: Answer, seconds: float) -> None:
        matcher = remote.matcher
        self._observe(self._clock() - remote.asked)
        if not remote.is_opening:
            matcher.seconds += seconds
        is_costly = matcher.seconds > _allowed_seconds(matcher)
        matcher.answer = Refused(TOO_COSTLY) if is_costly else answer

    def _slow_down(self, client: str) -> None:
        """Others have waited for this client's mask. What else it has asked for moves."""
        self._slow_clients.add(client)
        for sequence, remote in tuple(self._remotes.items()):
            if remote.client == client and remote.matcher.answer is None:
                self.ask(sequence, client, remote.matcher)

    def _lose(self, lane: Lane, loss: LaneLost) -> None:
        """The process is gone. All that is unanswered begins again; the culprit's client's behind
        the others'.
        """
        logger.warning("a grammar process was lost: %s", loss)
        lane.deaths += 1
        last = None
        if (culprit := loss.culprit) is not None:
            lane.deaths, last = 0, culprit.client
            self._blame(culprit, lane)
        lost = [remote for remote in self._remotes.values() if remote.lane is lane]
        for remote in lost:
            self._drop(remote.sequence)
        for remote in sorted(lost, key=lambda one: one.client == last):
            if remote.matcher.answer is None:
                self._begin_again(remote)

    def _blame(self, culprit: Job, lane: Lane) -> None:
        """What has ended the slow process is followed no further, if its client is still there.
        Where it may have been a draft, nothing more is asked along its drafts: they refuse nobody.
        """
        self._slow_clients.add(culprit.client)
        remote = self._remote(culprit.number, lane)
        if remote is not None and remote.drafted is not None:
            remote.matcher.draft_seconds = math.inf
        elif lane is self._slow and remote is not None:
            remote.matcher.refusal = Refused(TOO_COSTLY)

    def _begin_again(self, remote: _RemoteMatcher) -> None:
        if remote.lane.deaths >= MOST_STARTS:
            remote.matcher.answer = NOBODY_ANSWERS
        else:
            self.ask(remote.sequence, remote.client, remote.matcher)


def _allowed_seconds(matcher: Matcher) -> float:
    return ALLOWED_SECONDS + ALLOWED_SECONDS_A_TOKEN * len(matcher.tokens)


def _is_spent(matcher: Matcher) -> bool:
    """Whether nothing more is asked along its drafts."""
    return matcher.draft_seconds > _allowed_seconds(matcher)


def _give_up(question: LookAhead | None) -> None:
    """It is answered no more: there are no masks along the draft."""
    if question is not None and question.answers is None:
        question.answers = ()


def _numbers(fields: dict[str, object]) -> tuple[int, int, float]:
    """Raises ProtocolError."""
    match fields:
        case {"id": int(number), "n_tokens": int(n_tokens), "seconds": float(seconds)}:
            return number, n_tokens, seconds
    raise ProtocolError("a report without its numbers")
