"""What a grammar process does: trials, and the masks of matchers that it keeps."""

import select
import signal
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time

from llguidance import LLMatcher, LLTokenizer

from engine.grammar.client_queues import ClientQueues
from engine.grammar.remote.wire import (
    Ahead,
    Mask,
    Message,
    Said,
    ahead_frame,
    mask_frame,
    read_request,
    report_frame,
)
from engine.grammar.worker.grammar import GrammarError, compile_grammar, probe
from engine.grammar.worker.memory import MemoryMeter
from engine.grammar.worker.opened import OpenMatcher, Unfollowable
from engine.process.sockets import FrameBuffer, send_all

READ_BYTES = 1024**2
TURN_SECONDS = 0.01
"""Of the processor: a matcher that is given many tokens at once yields to others after so long, and
one that is asked of a draft says what it knows by then."""

KEPT_GRAMMARS = 128
KEPT_CHARACTERS = 1024**2
"""A schema of 190,000 takes 28 MB when it is compiled."""


class Service:
    """One thread: it does one job after another, and looks between two at what else is wanted.

    A job that takes more processor time than it may ends the process: nothing else stops a library
    that does not look at the clock.
    """

    def __init__(
        self,
        peer: socket.socket,
        tokenizer: LLTokenizer,
        clock: Callable[[], float] = thread_time,
    ) -> None:
        self._peer = peer
        self._tokenizer = tokenizer
        self._clock = clock
        self._memory = MemoryMeter()
        self._mask_bytes = 4 * -(-tokenizer.vocab_size // 32)
        self._frames = FrameBuffer()
        self._jobs = ClientQueues[Message]()
        self._open: dict[int, OpenMatcher] = {}
        self._grammars: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    def run(self) -> None:
        """Returns when the daemon has closed its end."""
        while self._listen():
            if (client := self._jobs.next_client()) is not None:
                self._do(self._jobs.take(client))

    def _listen(self) -> bool:
        """Take in what has come; waits where there is nothing to do. False at the end."""
        while not self._jobs or select.select([self._peer], [], [], 0)[0]:
            data = self._peer.recv(READ_BYTES)
            if not data:
                return False
            for body in self._frames.add(data):
                self._take(read_request(body))
        return True

    def _take(self, message: Message) -> None:
        if message["do"] == "close":
            self._jobs.drop(lambda job: job["id"] == message["id"])
            self._open.pop(message["id"], None)
        else:
            self._jobs.add(message["client"], message)

    def _do(self, job: Message) -> None:
        with _bounded(job["seconds"]):
            match job["do"]:
                case "try":
                    frame = self._try(job)
                case "open":
                    self._say_begun(job)
                    frame = self._begin(job)
                case "step":
                    self._say_begun(job)
                    frame = self._go_on(job, self._clock())
                case "ahead":
                    self._say_begun(job)
                    frame = self._look_ahead(job)
                case other:
                    raise ValueError(f"no such job: {other}")
        send_all(self._peer, frame)

    def _say_begun(self, job: Message) -> None:
        said = {name: job[name] for name in ("id", "client", "seconds")}
        left = self._memory.bytes_left()
        send_all(self._peer, report_frame(Said.BEGUN, {**said, "bytes_left": left}))

    def _try(self, job: Message) -> bytes:
        began = self._clock()
        error = None
        try:
            probe(compile_grammar(self._tokenizer, job["kind"], job["text"]))
        except GrammarError as refusal:
            error = str(refusal)
        return report_frame(Said.VERDICT, {"error": error, "seconds": self._clock() - began})

    def _begin(self, job: Message) -> bytes:
        began = self._clock()
        try:
            matcher = self._grammar(job["kind"], job["text"]).deep_copy()
        except GrammarError as refusal:
            return self._failed(job["id"], 0, began, str(refusal))
        self._open[job["id"]] = OpenMatcher(matcher, self._mask_bytes)
        return self._go_on(job, began)

    def _go_on(self, job: Message, began: float) -> bytes:
        """What may follow the job's tokens; nothing where some are left for another turn."""
        name, tokens = job["id"], job["tokens"]
        one = self._open[name]
        for n_told, token in enumerate(tokens, 1):
            one.accept(token)
            if n_told < len(tokens) and self._clock() - began > TURN_SECONDS:
                rest = {**job, "do": "step", "tokens": tokens[n_told:]}
                self._jobs.resume(job["client"], rest)
                return b""
        return self._answer(name, one, began)

    def _answer(self, name: int, one: OpenMatcher, began: float) -> bytes:
        if one.is_complete:
            seconds = self._clock() - began
            fields = {"id": name, "n_tokens": one.n_tokens, "seconds": seconds}
            return report_frame(Said.STOPPED, fields)
        try:
            bits, forced = one.mask(), one.forced()
        except Unfollowable as error:
            return self._failed(name, one.n_tokens, began, str(error))
        return mask_frame(Mask(name, one.n_tokens, self._clock() - began, forced, bits))

    def _look_ahead(self, job: Message) -> bytes:
        """What may follow along a draft; nothing of a grammar that could not be opened."""
        began = self._clock()
        one = self._open.get(job["id"])
        masks, is_complete = list[bytes](), False
        if one is not None:
            masks, is_complete = one.ahead(
                job["tokens"], lambda: self._clock() - began > TURN_SECONDS
            )
        seconds = self._clock() - began
        return ahead_frame(Ahead(job["id"], job["question"], seconds, is_complete, b"".join(masks)))

    def _failed(self, name: int, n_tokens: int, began: float, error: str) -> bytes:
        seconds = self._clock() - began
        fields = {"id": name, "n_tokens": n_tokens, "seconds": seconds, "error": error}
        return report_frame(Said.FAILED, fields)

    def _grammar(self, kind: str, text: str) -> LLMatcher:
        """At its beginning: to be copied, never to be moved on. Raises GrammarError."""
        key = kind, text
        if key not in self._grammars:
            self._grammars[key] = compile_grammar(self._tokenizer, kind, text)
        self._grammars.move_to_end(key)
        matcher = self._grammars[key]
        while self._is_full():
            self._grammars.popitem(last=False)
        return matcher

    def _is_full(self) -> bool:
        characters = sum(len(text) for _, text in self._grammars)
        return len(self._grammars) > KEPT_GRAMMARS or characters > KEPT_CHARACTERS


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """The system ends this process when it has had the processor for so long within."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
