"""Counters and latency histograms of the engine.

The engine thread writes them, except `received`. Any thread may read them without a lock, and sees
values of the last microseconds.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import inf
from time import monotonic

from engine.core.sequence import LiveSequence
from engine.values.stats import (
    DraftCounts,
    DraftSource,
    Latencies,
    Latency,
    RecentHits,
    no_latencies,
)

HIT_INTERVAL_SECONDS = 10.0
HIT_WINDOWS_SECONDS = (60, 300, 900)
MOST_HIT_COUNTS = int(HIT_WINDOWS_SECONDS[-1] / HIT_INTERVAL_SECONDS) + 3
"""An interval at each end of the longest window, which begins within one and ends within one. One
more, because a reader's time may be a moment before the last admission.
"""

PACE_WINDOW = 16
"""Number of departures from the queue that its pace is computed from."""


class HitWindows:
    """Counts the prompt tokens looked up and found in the last minutes.

    Both counters change only at admissions, so they are noted there. One entry for each interval
    with an admission suffices: a window may be an interval too long.
    """

    def __init__(self) -> None:
        self._entries = deque([(-inf, 0, 0)], maxlen=MOST_HIT_COUNTS)  # seconds, queried, hit

    def note(self, now: float, queried_tokens: int, hit_tokens: int) -> None:
        """Note the counters since the start, after an admission at `now`."""
        entry, entries = (now, queried_tokens, hit_tokens), self._entries
        if entries[-1][0] // HIT_INTERVAL_SECONDS == now // HIT_INTERVAL_SECONDS:
            entries[-1] = entry
        else:
            entries.append(entry)

    def recent(self, now: float) -> tuple[RecentHits, ...]:
        """The tokens of each of HIT_WINDOWS_SECONDS, up to `now`. On any thread."""
        entries = list(self._entries)  # a copy at once: the engine thread may append meanwhile
        _, queried_tokens, hit_tokens = entries[-1]
        windows = []
        for seconds in HIT_WINDOWS_SECONDS:
            _, queried_before, hit_before = next(e for e in entries[::-1] if e[0] <= now - seconds)
            windows.append(
                RecentHits(seconds, queried_tokens - queried_before, hit_tokens - hit_before)
            )
        return tuple(windows)


class QueuePace:
    """Measures the seconds between the last departures from the queue, on the caller's clock.

    Only time in which a sequence waits counts, so a quiet night does not affect the next estimate.
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._read_seconds = 0.0  # the caller's clock at the last call
        self._waited_seconds = 0.0  # in which a sequence waited
        self._departures = deque([0.0], maxlen=PACE_WINDOW + 1)  # in waited seconds, after a start

    def joined(self, n: int, now: float) -> None:
        """Count n sequences that enter the queue."""
        self._read(now)
        self._waiting += n

    def left(self, now: float) -> None:
        """Count one sequence that leaves the queue."""
        self._read(now)
        self._waiting -= 1
        self._departures.append(self._waited_seconds)

    def seconds_until_left(self, n: int, now: float) -> float:
        """Estimate the time until n more sequences leave, at the pace of the last departures."""
        self._read(now)
        n_departures = max(len(self._departures) - 1, 1)
        return n * (self._waited_seconds - self._departures[0]) / n_departures

    def _read(self, now: float) -> None:
        if self._waiting:
            self._waited_seconds += now - self._read_seconds
        self._read_seconds = now


class Metrics:
    """All counters and histograms of one engine, since its start.

    The scheduler counts, and times each sequence from its arrival to its last event; the loop times
    the steps.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.now = clock
        self.received = 0  # sequences; written by the event loop of the callers
        self.steps = 0
        self.computed_prompt_tokens = 0
        self.warmed_tokens = 0  # of them those computed in the background
        self.queried_prompt_tokens = 0  # of prompts that may adopt cached tokens
        self.cached_prompt_tokens = 0
        self.generated_tokens = 0
        self.preemptions = 0  # for lack of blocks
        self.client_preemptions = 0  # so that another client's sequence could be admitted
        self.recomputed_sequences = 0  # because a step of theirs, or the storage, was lost
        self.late_rows = 0  # rows not sampled in a step because their mask was not known yet
        self.contradictions = 0  # found by recounting the store while the engine was idle
        self.drafts = dict.fromkeys(DraftSource, DraftCounts())
        self._histograms = histograms = no_latencies()
        self.first_token_seconds = histograms[Latency.FIRST_TOKEN]
        self.token_gap_seconds = histograms[Latency.TOKEN_GAP]
        self.request_seconds = histograms[Latency.REQUEST]
        self.queue_wait_seconds = histograms[Latency.QUEUE_WAIT]
        self.step_seconds = histograms[Latency.STEP]
        self.mask_seconds = histograms[Latency.MASK]
        self._hits = HitWindows()
        self._pace = QueuePace()

    def latencies(self) -> Latencies:
        """A copy of all histograms. On any thread."""
        histograms = self._histograms.items()
        return {latency: replace(each, counts=each.counts.copy()) for latency, each in histograms}

    def recent_hits(self) -> tuple[RecentHits, ...]:
        """Prefix cache hits of the last minutes, as of now. On any thread."""
        return self._hits.recent(self.now())

    def queued(self, n_sequences: int) -> None:
        """Count sequences that arrive and wait for admission."""
        self._pace.joined(n_sequences, self.now())

    def admitted(self, sequence: LiveSequence) -> None:
        """Count the first admission of a sequence. One that is computed in the background has no
        client that waits, and says nothing about what clients find in the cache. A prompt with
        several outputs is looked up once.
        """
        if sequence.request.is_background:
            return
        now = self.now()
        self._pace.left(now)
        self.queue_wait_seconds.observe(now - sequence.arrived_seconds)
        if sequence.first is None:
            if sequence.can_use_prefix_cache:
                self.queried_prompt_tokens += sequence.prompt_tokens
            self.cached_prompt_tokens += sequence.cached_tokens
        self._hits.note(now, self.queried_prompt_tokens, self.cached_prompt_tokens)

    def verified(self, source: DraftSource, drafted_tokens: int, accepted_tokens: int) -> None:
        """Count a draft that a step has verified."""
        counts = self.drafts[source]
        drafted_tokens += counts.drafted_tokens
        accepted_tokens += counts.accepted_tokens
        self.drafts[source] = DraftCounts(counts.drafts + 1, drafted_tokens, accepted_tokens)

    def seconds_until_left(self, n: int) -> float:
        """Estimate the time until n more sequences leave the queue."""
        return self._pace.seconds_until_left(n, self.now())

    def token(self, sequence: LiveSequence, now: float) -> None:
        """Count a token of the sequence that is emitted at `now`. For one in the background nobody
        waits.
        """
        if sequence.request.is_background:
            return
        last = sequence.last_token_seconds
        if last is None:
            self.first_token_seconds.observe(now - sequence.arrived_seconds)
        else:
            self.token_gap_seconds.observe(now - last)
        sequence.last_token_seconds = now

    def finished(self, sequence: LiveSequence) -> None:
        """Count the end of a sequence."""
        if sequence.request.is_background:
            return
        now = self.now()
        self.request_seconds.observe(now - sequence.arrived_seconds)
        if not sequence.admissions:
            self._pace.left(now)
