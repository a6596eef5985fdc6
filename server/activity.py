"""Requests that are answered now, the last that were, and histograms of their sequences.

In memory, bounded, and without any text of prompts or answers.
"""

import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from heapq import merge
from itertools import takewhile
from operator import attrgetter

from anyio import get_cancelled_exc_class
from starlette.status import HTTP_400_BAD_REQUEST

from engine.values.output import FinishReason, OutputEvent, Usage
from engine.values.request import Request
from engine.values.stats import Histogram, Latency
from server.admin_schema import FinishedRequest, RequestSummary
from server.errors import CLIENT_LEFT_STATUS, ApiError, timed_out, to_api_error
from server.record import RequestRecord

TOKEN_BOUNDS = tuple(float(n * 10**power) for power in range(6) for n in (1, 2, 5))
WHOLE = frozenset({FinishReason.STOP, FinishReason.LENGTH})


def _tokens() -> Histogram:
    return Histogram.empty(TOKEN_BOUNDS)


@dataclass(frozen=True, slots=True)
class FinishedSequences:
    """Histograms of one model's sequences that ended with STOP or LENGTH.

    Times are measured where their events arrive in the server's process.
    """

    prompt_tokens: Histogram = field(default_factory=_tokens)
    output_tokens: Histogram = field(default_factory=_tokens)
    longest_output_tokens: Histogram = field(default_factory=_tokens)  # of an engine request's n
    prefill_seconds: Histogram = field(
        default_factory=partial(Histogram.empty, Latency.FIRST_TOKEN.bounds_seconds)
    )
    """From the first admission to the first token."""
    decode_seconds: Histogram = field(
        default_factory=partial(Histogram.empty, Latency.REQUEST.bounds_seconds)
    )
    """From the first token to the end."""
    seconds_per_token: Histogram = field(
        default_factory=partial(Histogram.empty, Latency.TOKEN_GAP.bounds_seconds)
    )
    """Mean time of the tokens after the first, of sequences that have some."""


class SequenceTimes:
    """Follows the sequences of one HTTP request, and counts those in `finished` that end whole."""

    def __init__(self, finished: FinishedSequences, n: int) -> None:
        """`n` is the number of sequences of each engine request."""
        self._finished = finished
        self._n = n
        self._prefilling: dict[tuple[str, int], float] = {}  # since when
        self._decoding: dict[tuple[str, int], tuple[float, float]] = {}  # prefill time, since when
        self._output_tokens = defaultdict[str, list[int]](list)  # of ended ones, by engine request

    def need_not_know(self, event: OutputEvent) -> bool:
        """Whether the event is just the next tokens of a sequence that decodes, as most are."""
        return not (event.admission or event.finish_reason or self._prefilling)

    def note(self, event: OutputEvent, now: float) -> None:
        """Count an event that arrived at `now`, in seconds of any one clock."""
        sequence = event.request_id, event.index
        if event.admission is not None:
            self._prefilling[sequence] = now
        if event.token_ids and (admitted := self._prefilling.pop(sequence, None)) is not None:
            self._decoding[sequence] = now - admitted, now
        if event.usage is not None and event.finish_reason in WHOLE:
            self._ended(sequence, event.usage, now)

    def _ended(self, sequence: tuple[str, int], usage: Usage, now: float) -> None:
        finished, n_tokens = self._finished, usage.completion_tokens
        finished.prompt_tokens.observe(usage.prompt_tokens)
        finished.output_tokens.observe(n_tokens)
        lengths = self._output_tokens[sequence[0]]
        lengths.append(n_tokens)
        if len(lengths) == self._n:
            finished.longest_output_tokens.observe(max(lengths))
        if (times := self._decoding.pop(sequence, None)) is None:
            return
        prefill_seconds, first_token = times
        decode_seconds = now - first_token
        finished.prefill_seconds.observe(prefill_seconds)
        finished.decode_seconds.observe(decode_seconds)
        if n_tokens > 1:
            finished.seconds_per_token.observe(decode_seconds / (n_tokens - 1))


KEPT = 300
"""Finished requests that are kept: some 100 KiB."""

KEPT_REFUSED = 50
"""Requests that failed before they reached an engine. They are kept apart from the others, so that
a client that tries again and again does not push those out of the log."""

MAX_PATH_CHARACTERS = 100  # of a refused request, whose path may be any

_AGENTS = {
    "aider": "aider",
    "charm crush/": "Crush",
    "charm-crush/": "Crush",
    "claude-": "Claude Code",
    "cline/": "Cline",
    "codex": "Codex",
    "copilot/": "Copilot",
    "githubcopilot": "Copilot",
    "goose": "goose",
    "kilo-code/": "Kilo Code",
    "mozilla/": "a browser",
    "opencode/": "OpenCode",
    "qwencode/": "Qwen Code",
    "roo-code/": "Roo Code",
    "zed/": "Zed",
}
"""Agents by the beginning of their User-Agent header, in lower case."""

_PRODUCT = re.compile(r"([\w!#$%&'*+.^`|~-]{1,32})(/[a-z]{1,16}\b)?", re.ASCII | re.IGNORECASE)
"""The first product of a User-Agent header (RFC 9110, section 10.1.5). What follows the slash
belongs to the name if it is a word: OpenAI's and Anthropic's packages send their language there.
"""


def agent_name(user_agent: str) -> str | None:
    """The program that sends a request, at most 49 characters: an agent's name, or the product that
    the User-Agent header begins with. None without such a header.
    """
    lower = user_agent.lower()
    for beginning, name in _AGENTS.items():
        if lower.startswith(beginning):
            return name
    product = _PRODUCT.match(user_agent)
    return product[0] if product else None


class TrackedRequest:
    """One HTTP request that the engine answers, from its submission to the end of the answer.

    `note` is called for each event: it counts tokens, and little else.
    """

    def __init__(
        self,
        record: RequestRecord,
        requests: Sequence[Request],
        clock: Callable[[], float],
        finished: FinishedSequences,
    ) -> None:
        self.record = record
        self.requests = requests
        self.agent = agent_name(record.user_agent)
        self.began_seconds = clock()
        self.cached_tokens = 0
        self.output_tokens = 0
        self.accepted_draft_tokens = 0  # of sequences that have finished
        self.unfinished = sum(request.n for request in requests)  # sequences
        self._clock = clock
        self._times = SequenceTimes(finished, requests[0].n)
        self._first_token: float | None = None  # of the clock
        self._last_token: float | None = None  # known when all sequences have finished

    @property
    def first_token_seconds(self) -> float | None:
        return None if self._first_token is None else self._first_token - self.began_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """The rate of tokens after the first; None before there are any."""
        if self._first_token is None or self.output_tokens < 2:
            return None
        seconds = (self._last_token or self._clock()) - self._first_token
        return (self.output_tokens - 1) / seconds if seconds > 0 else None

    def note(self, event: OutputEvent) -> None:
        """Count an event of one of its sequences, in the record, too."""
        n_tokens = len(event.token_ids)
        self.output_tokens += n_tokens
        self.record.tokens += n_tokens
        if self._first_token is not None and self._times.need_not_know(event):
            return
        if event.admission is not None and event.index == 0:  # the others have the same prompt
            self._admitted(event.admission)
        now = self._clock()
        self._times.note(event, now)
        if n_tokens and self._first_token is None:
            self._first_token = now
        if event.usage is not None:
            self.accepted_draft_tokens += event.usage.accepted_draft_tokens
        if event.finish_reason is not None:
            self.unfinished -= 1
            if not self.unfinished:
                self._last_token = now

    def _admitted(self, usage: Usage) -> None:
        self.record.tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens

    def summary(self, accepted_draft_tokens: int = 0) -> RequestSummary:
        """The current figures. `accepted_draft_tokens` are those of unfinished sequences."""
        record = self.record
        return RequestSummary(
            id=record.id,
            route=record.path,
            model=record.model,
            client=record.client,
            key=record.key or None,
            agent=self.agent,
            sequences=sum(request.n for request in self.requests),
            prompt_tokens=sum(len(request.prompt) for request in self.requests),
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            accepted_draft_tokens=self.accepted_draft_tokens + accepted_draft_tokens,
            first_token_seconds=self.first_token_seconds,
            tokens_per_second=self.tokens_per_second,
        )


class RequestTracker:
    """All requests that an engine answers now, by id, the last KEPT that are over, and the last
    KEPT_REFUSED that failed before they reached an engine.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        epoch_seconds: Callable[[], float] = time.time,
    ) -> None:
        """`clock` is that of deadlines: event loops have the monotonic one."""
        self.sequences = defaultdict[str, FinishedSequences](FinishedSequences)
        """Of each model, by its own name."""
        self._clock = clock
        self._epoch_seconds = epoch_seconds
        self._live: dict[str, TrackedRequest] = {}
        self._finished = deque[FinishedRequest](maxlen=KEPT)
        self._refused = deque[FinishedRequest](maxlen=KEPT_REFUSED)
        self._n_finished = 0

    @property
    def live(self) -> tuple[TrackedRequest, ...]:
        """The oldest first."""
        return tuple(self._live.values())

    def now(self) -> float:
        return self._clock()

    def finished(self, after: int = 0) -> list[FinishedRequest]:
        """The finished and refused requests with higher numbers than `after`, the latest first."""
        both = merge(
            reversed(self._finished),
            reversed(self._refused),
            key=attrgetter("number"),
            reverse=True,
        )
        return list(takewhile(lambda one: one.number > after, both))

    @contextmanager
    def answering(
        self, record: RequestRecord, requests: Sequence[Request]
    ) -> Iterator[TrackedRequest]:
        """Track the requests while the block answers them. An exception out of the block is the
        outcome. Lines of batches are tracked, but neither logged nor in the histograms.
        """
        is_line = record.is_background  # of a batch: thousands, for which nobody waits
        finished = FinishedSequences() if is_line else self.sequences[record.own_model]
        tracked = TrackedRequest(record, requests, self._clock, finished)
        self._live[record.id] = tracked
        status, code = 200, None
        try:
            yield tracked
        except get_cancelled_exc_class():
            status, code = self._cancellation(record)
            raise
        except Exception as error:
            failure = to_api_error(error)
            status, code = failure.status, failure.code
            raise
        finally:
            del self._live[record.id]
            record.was_tracked = True
            seconds = self._clock() - tracked.began_seconds
            if not is_line:
                self._log(self._finished, tracked.summary(), seconds, status, code)

    def note_refused(self, record: RequestRecord, seconds: float) -> None:
        """Log a request that is over after `seconds`, if it failed before it reached an engine."""
        if record.was_tracked or record.status < HTTP_400_BAD_REQUEST:
            return
        status, code = record.ended or (record.status, record.error_code)
        summary = RequestSummary(
            id=record.id,
            route=record.path[:MAX_PATH_CHARACTERS],
            model=record.model,
            client=record.client,
            key=record.key or None,
            agent=agent_name(record.user_agent),
            sequences=0,
            prompt_tokens=0,
            cached_tokens=0,
            output_tokens=0,
            accepted_draft_tokens=0,
            first_token_seconds=None,
            tokens_per_second=None,
        )
        self._log(self._refused, summary, seconds, status, code)

    def end(self, id: str, error: ApiError) -> bool:
        """End a request with an error for its client. False where there is none of that id."""
        tracked = self._live.get(id)
        if tracked is None:
            return False
        tracked.record.end(error)
        return True

    def _log(
        self,
        log: deque[FinishedRequest],
        summary: RequestSummary,
        seconds: float,
        status: int,
        code: str | None,
    ) -> None:
        self._n_finished += 1
        log.append(
            FinishedRequest(
                **vars(summary),
                number=self._n_finished,
                time=self._epoch_seconds(),
                seconds=seconds,
                status=status,
                code=code,
            )
        )

    def _cancellation(self, record: RequestRecord) -> tuple[int, str | None]:
        """Status and code of a cancelled request: by `RequestRecord.end`, by its client, by its
        deadline, or by a call that cancels a background response.
        """
        if record.ended is not None:
            return record.ended
        if record.client_left:
            return CLIENT_LEFT_STATUS, "client_left"
        if self._clock() >= record.deadline:
            return timed_out().status, timed_out().code
        return CLIENT_LEFT_STATUS, "cancelled"
