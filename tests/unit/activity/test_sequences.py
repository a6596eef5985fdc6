"""Histograms of sequences that have finished."""

from engine.values.output import FinishReason, OutputEvent, Usage
from engine.values.stats import Histogram
from server.activity import FinishedSequences, SequenceTimes


def admission(index: int = 0) -> OutputEvent:
    return OutputEvent("r", index, admission=Usage(10, 0, 0))


def token(index: int = 0) -> OutputEvent:
    return OutputEvent("r", index, token_ids=(7,))


def end(n_tokens: int, reason: FinishReason = FinishReason.STOP, index: int = 0) -> OutputEvent:
    usage = Usage(10, 0, n_tokens)
    return OutputEvent("r", index, token_ids=(7,), finish_reason=reason, usage=usage)


def count_and_total(histogram: Histogram) -> tuple[int, float]:
    return histogram.count, histogram.total


def test_a_value_belongs_to_the_first_bound_that_is_not_below_it() -> None:
    histogram = Histogram.empty((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 7.5)


def test_prefill_ends_with_the_first_token_and_decoding_with_the_last() -> None:
    finished = FinishedSequences()
    times = SequenceTimes(finished, n=1)
    for event, now in ((admission(), 10.0), (token(), 13.0), (token(), 15.0), (end(3), 17.0)):
        times.note(event, now)
    assert count_and_total(finished.prompt_tokens) == (1, 10)
    assert count_and_total(finished.output_tokens) == (1, 3)
    assert count_and_total(finished.prefill_seconds) == (1, 3.0)
    assert count_and_total(finished.decode_seconds) == (1, 4.0)
    assert count_and_total(finished.seconds_per_token) == (1, 2.0)


def test_a_single_token_has_no_time_per_token() -> None:
    finished = FinishedSequences()
    times = SequenceTimes(finished, n=1)
    times.note(admission(), 0.0)
    times.note(end(1), 2.0)
    assert count_and_total(finished.prefill_seconds) == (1, 2.0)
    assert count_and_total(finished.decode_seconds) == (1, 0.0)
    assert count_and_total(finished.seconds_per_token) == (0, 0.0)


def test_the_longest_of_a_requests_sequences_is_counted_once() -> None:
    finished = FinishedSequences()
    times = SequenceTimes(finished, n=2)
    for index in range(2):
        times.note(admission(index), 0.0)
    times.note(end(5, index=1), 1.0)
    assert count_and_total(finished.longest_output_tokens) == (0, 0)
    times.note(end(3, index=0), 2.0)
    assert count_and_total(finished.longest_output_tokens) == (1, 5)


def test_an_aborted_sequence_is_not_counted() -> None:
    finished = FinishedSequences()
    times = SequenceTimes(finished, n=1)
    times.note(admission(), 0.0)
    times.note(end(2, FinishReason.ABORT), 1.0)
    assert finished == FinishedSequences()
