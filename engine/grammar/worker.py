"""A grammar worker, the only process in which llguidance runs: `python -m engine.grammar.worker
SOCKET VOCABULARY`, two file descriptors that it inherits.

It parses what clients send, and may crash, hang or take any amount of memory. It imports nothing of
the daemon but the wire format, and no MLX.
"""

import json
import os
import re
import resource
import signal
import socket
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from time import thread_time

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.grammar.gbnf import lark_of
from engine.grammar.json_schema import faithful
from engine.grammar.wire import (
    EXCEPTION_EXIT,
    MEMORY_BYTES,
    JobReport,
    ReportKind,
    WireMessage,
    read_request,
    report_frame,
)
from engine.process.sockets import FrameBuffer, send_all

READ_BYTES = 1024**2
TURN_SECONDS = 0.01
"""Processor time after which a job that gives a matcher many tokens returns, and after which no
more of a draft is followed."""

KEPT_GRAMMARS = 128
KEPT_CHARACTERS = 1024**2
"""Of the texts of the grammars that are kept. A schema of 190,000 takes 28 MB when compiled."""

MOST_FORCED = 32
"""Forced tokens in a report: more are never verified in one step."""

PROBED_STEPS = 24
MAX_MESSAGE_CHARACTERS = 400

WHITESPACE = r"( |\n[ \t]{0,24})?"
"""Between JSON's tokens: a space, or a new line and its indentation. Bounded, or a model that likes
spaces never comes to an end."""

JSON_ESCAPES = 'nrbtf\\"'
"""Escapes allowed in strings: all but \\u, with which a name has spellings that schemas do not
see."""

LIMITS = LLParserLimits(
    max_items_in_row=20_000,
    initial_lexer_fuel=1_000_000,  # about 20 ms
    step_lexer_fuel=200_000,  # about 14 ms
    step_max_items=50_000,
    max_lexer_states=50_000,  # 2 kB each
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""They refuse most costly grammars with a reason. They do not bound all work: the worker's
processor time does."""


_ADVICE = re.compile(r"[.;] (Enable '|either increase limits).*")
"""In an error of llguidance: which of its own settings would help."""


class GrammarError(ValueError):
    """The grammar is wrong, not supported, too costly, or cannot be followed, in words for a
    client.
    """


def compile_grammar(tokenizer: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """Make a matcher at the beginning of a `json_schema`, `regex`, `lark` or `gbnf` grammar.

    Raises GrammarError.
    """
    try:
        source = _source(kind, text)
    except (ValueError, RecursionError) as error:  # half a character; nested too deeply
        raise GrammarError(_reason(str(error))) from error
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(_reason(matcher.get_error()))
    return matcher


def probe(matcher: LLMatcher) -> None:
    """Walk some steps with a copy: some grammars turn out wrong or costly only there.

    Raises GrammarError.
    """
    walker = matcher.deep_copy()
    for _ in range(PROBED_STEPS):
        mask = int.from_bytes(walker.compute_bitmask(), "little")
        if walker.is_error():
            raise GrammarError(_reason(walker.get_error()))
        if walker.is_stopped() or not mask:
            return
        walker.consume_token(mask.bit_length() - 1)  # the last is seldom the end


def _source(kind: str, text: str) -> str:
    """Convert a grammar to llguidance's own form. Raises ValueError or RecursionError."""
    match kind:
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "lark":
            return LLMatcher.grammar_from_lark(text)
        case "gbnf":
            return LLMatcher.grammar_from_lark(lark_of(text))
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(
                json.dumps(faithful(text)),
                overrides={
                    "whitespace_pattern": WHITESPACE,
                    "json_allowed_escapes": JSON_ESCAPES,
                    "lenient": False,
                },
            )
    raise ValueError(f"no such kind of grammar: {kind}")


def _reason(message: str) -> str:
    """The part of llguidance's error that a client gets: its first line, with what is wrong with a
    regular expression, and without advice on settings that no client has.
    """
    first, *others = message.strip().splitlines() or ["it cannot be compiled"]
    problems = [line for line in others if line.startswith("error: ")]  # of the regex-syntax crate
    found = " ".join([first, *(line.removeprefix("error: ") for line in problems[:1])])
    if found == "NoExtensionBias":
        found = "no text matches it"
    return _ADVICE.sub("", found)[:MAX_MESSAGE_CHARACTERS]


class OpenMatcher:
    """A matcher that has been given `n_tokens`.

    To find forced tokens takes as long as their whole run, so that is done once for each run.
    """

    def __init__(self, matcher: LLMatcher, mask_bytes: int) -> None:
        self.n_tokens = 0
        self._matcher = matcher
        self._mask_bytes = mask_bytes
        self._forced = deque[int]()

    def accept(self, token: int) -> None:
        """Give the matcher a token. An error shows in the next mask."""
        self._matcher.consume_token(token)
        self.n_tokens += 1
        if self._forced and self._forced[0] == token:
            self._forced.popleft()
        else:
            self._forced.clear()

    @property
    def is_complete(self) -> bool:
        return _is_complete(self._matcher)

    def mask(self) -> bytes:
        """The tokens that may follow; see `wire.JobReport`. Raises GrammarError."""
        return _mask(self._matcher, self._mask_bytes)

    def forced(self) -> tuple[int, ...]:
        """The first of the tokens that must follow; none where there is a choice."""
        if not self._forced:
            self._forced.extend(self._matcher.compute_ff_tokens())
        return tuple(islice(self._forced, MOST_FORCED))

    def ahead(self, tokens: Iterable[int], is_over: Callable[[], bool]) -> tuple[list[bytes], bool]:
        """The masks after the first of a draft's tokens, after the second, and so on, and whether
        the grammar is complete after the last token that it follows.

        There are fewer masks where the grammar refuses a token, and once `is_over`. The matcher
        does not change: a copy is walked, which takes microseconds and has limits of its own.
        """
        walker, masks = self._matcher.deep_copy(), list[bytes]()
        for token in tokens:
            if is_over() or not walker.consume_token(token):
                break
            if _is_complete(walker):
                return masks, True
            try:
                masks.append(_mask(walker, self._mask_bytes))
            except GrammarError:
                break
        return masks, False


def _is_complete(matcher: LLMatcher) -> bool:
    return matcher.is_stopped() and not matcher.is_error()  # an error stops it, too


def _mask(matcher: LLMatcher, mask_bytes: int) -> bytes:
    """Raises GrammarError."""
    bits = matcher.compute_bitmask()[:mask_bytes]  # it has a word more
    if matcher.is_error() or not any(bits):
        why = _reason(matcher.get_error() or "it allows no token")
        raise GrammarError(f"it cannot be followed: {why}")
    return bits


class MemoryMeter:
    """The memory that the process has left, on Linux. Elsewhere all of it counts as left."""

    def __init__(self) -> None:
        self._sizes: int | None = None
        with suppress(OSError):
            self._sizes = os.open("/proc/self/statm", os.O_RDONLY)

    def bytes_left(self) -> int:
        """The rest of RLIMIT_DATA, less the stack."""
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        if self._sizes is None:
            return limit
        data_pages = os.pread(self._sizes, 200, 0).split()[5]
        return limit - int(data_pages) * resource.getpagesize()


class Worker:
    """Does one job after another, in the order in which they come.

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
        self._open: dict[int, OpenMatcher] = {}
        self._grammars: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    def run(self) -> None:
        """Serve until the daemon closes its end. The first report is READY: what ends the process
        after that is the fault of a job.
        """
        probe(compile_grammar(self._tokenizer, "regex", "a"))
        self._send(JobReport(ReportKind.READY, bytes_left=self._memory.bytes_left()))
        frames = FrameBuffer()
        while data := self._peer.recv(READ_BYTES):
            for body in frames.add(data):
                self._do(read_request(body))

    def _do(self, job: WireMessage) -> None:
        match job["do"]:
            case "close":
                self._open.pop(job["id"], None)
            case "try":
                with _bounded(job["seconds"]):
                    self._send(self._try(job))
            case "advance":
                with _bounded(job["seconds"]):
                    self._send(self._advance(job))
            case other:
                raise ValueError(f"no such job: {other}")

    def _send(self, report: JobReport) -> None:
        send_all(self._peer, report_frame(report))

    def _try(self, job: WireMessage) -> JobReport:
        began, error = self._clock(), ""
        try:
            probe(self._compiled(job["kind"], job["text"]))
        except GrammarError as refusal:
            error = str(refusal)
            self._grammars.pop((job["kind"], job["text"]), None)
        seconds, left = self._clock() - began, self._memory.bytes_left()
        return JobReport(
            ReportKind.VERDICT, job["id"], seconds=seconds, bytes_left=left, error=error
        )

    def _advance(self, job: WireMessage) -> JobReport:
        began = self._clock()
        kind, error, n_tokens = ReportKind.ADVANCED, "", 0
        forced, mask = tuple[int, ...](), b""
        try:
            one = self._opened(job)
            n_tokens = one.n_tokens
            is_there = self._accept(one, job["tokens"], began)
            n_tokens = one.n_tokens
            if one.is_complete:
                kind = ReportKind.COMPLETE
            elif is_there and (job["tokens"] or "text" in job):
                kind, mask, forced = ReportKind.MASK, one.mask(), one.forced()
        except GrammarError as failure:
            kind, error = ReportKind.FAILED, str(failure)
        walked = self._clock()
        masks, is_draft_complete = list[bytes](), False
        is_ended = kind in (ReportKind.FAILED, ReportKind.COMPLETE)
        if not is_ended and job["draft"] and is_there:
            masks, is_draft_complete = one.ahead(
                job["draft"], lambda: self._clock() - walked > TURN_SECONDS
            )
        return JobReport(
            kind,
            job["id"],
            n_tokens,
            walked - began,
            self._clock() - walked,
            self._memory.bytes_left(),
            is_draft_complete,
            forced,
            mask,
            b"".join(masks),
            error,
        )

    def _opened(self, job: WireMessage) -> OpenMatcher:
        """The job's matcher, opened first if the job has its grammar. Raises GrammarError."""
        number = job["id"]
        if "text" in job:
            self._open.pop(number, None)
            matcher = self._compiled(job["kind"], job["text"]).deep_copy()
            self._open[number] = OpenMatcher(matcher, self._mask_bytes)
        if number not in self._open:
            raise GrammarError("it could not be opened")
        return self._open[number]

    def _accept(self, one: OpenMatcher, tokens: list[int], began: float) -> bool:
        """Give the matcher tokens for a turn. False if some are left."""
        for n_accepted, token in enumerate(tokens, 1):
            one.accept(token)
            if n_accepted < len(tokens) and self._clock() - began > TURN_SECONDS:
                return False
        return True

    def _compiled(self, kind: str, text: str) -> LLMatcher:
        """A matcher at the grammar's beginning: copy it, never advance it. Raises GrammarError."""
        key = kind, text
        if key not in self._grammars:
            self._grammars[key] = compile_grammar(self._tokenizer, kind, text)
        self._grammars.move_to_end(key)
        matcher = self._grammars[key]
        while self._is_full():
            self._grammars.popitem(last=False)
        return matcher

    def _is_full(self) -> bool:
        n_characters = sum(len(text) for _, text in self._grammars)
        return len(self._grammars) > KEPT_GRAMMARS or n_characters > KEPT_CHARACTERS


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Let the system end this process if it takes more processor time within the context."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _bound_memory() -> None:
    """Limit this process to MEMORY_BYTES. Linux enforces that; on macOS the parent watches."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY or most > MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _tokenizer(descriptor: int) -> LLTokenizer:
    """Read the vocabulary from a file that all workers share: by position."""
    size = os.fstat(descriptor).st_size
    parts, at = [], 0
    while at < size:
        part = os.pread(descriptor, size - at, at)
        parts.append(part)
        at += len(part)
    os.close(descriptor)
    told = json.loads(b"".join(parts))
    return LLTokenizer(told["tokenizer"], n_vocab=told["size"], eos_token=told["eos"] or None)


def main() -> None:
    """Serve until the daemon closes its end of the socket, or is gone."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the daemon handles them
        signal.signal(ignored, signal.SIG_IGN)
    _bound_memory()
    connection, vocabulary = int(sys.argv[1]), int(sys.argv[2])
    peer = socket.socket(fileno=connection)
    try:
        with suppress(ConnectionError):  # the daemon has closed its end
            Worker(peer, _tokenizer(vocabulary)).run()
    except BaseException:  # what Rust raises is no Exception
        os._exit(EXCEPTION_EXIT)  # at once: the daemon sees the socket close and reads the code
    peer.close()


if __name__ == "__main__":
    main()
