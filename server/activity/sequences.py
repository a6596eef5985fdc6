"""Token counts and phases of the sequences that have finished, in histograms."""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

from engine.values.output import FinishReason, OutputEvent, Usage
from engine.values.stats import Histogram, Latency

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
