"""Stop strings: what a client sees of text that may end in one."""

import pytest

from engine.output.text import StopChecker, TextDelta
from engine.values.output import FinishReason


def stopped(text: str, by: str) -> TextDelta:
    return TextDelta(text, FinishReason.STOP, by)


def test_text_that_begins_no_stop_string_passes_at_once() -> None:
    checker = StopChecker(("STOP",))
    assert checker.add("anything") == TextDelta("anything")
    assert checker.finish() == ""


def test_a_stop_string_inside_one_piece_ends_the_text_before_it() -> None:
    assert StopChecker(("END",)).add("all of it END and more") == stopped("all of it ", "END")


def test_a_stop_string_spread_over_pieces_is_never_shown() -> None:
    checker = StopChecker(("\n\n",))
    assert checker.add("one\n") == TextDelta("one")
    assert checker.add("\ntwo") == stopped("", "\n\n")


def test_a_beginning_that_comes_to_nothing_is_released() -> None:
    checker = StopChecker(("<stop>",))
    assert checker.add("a<st") == TextDelta("a")
    assert checker.add("ray>") == TextDelta("<stray>")


def test_a_stop_string_may_begin_inside_a_failed_beginning() -> None:
    checker = StopChecker(("aab",))
    assert checker.add("aa") == TextDelta("")
    assert checker.add("a") == TextDelta("a")
    assert checker.add("b") == stopped("", "aab")


def test_what_is_held_back_comes_out_when_the_sequence_ends_otherwise() -> None:
    checker = StopChecker(("Observation:",))
    assert checker.add("so: Observ") == TextDelta("so: ")
    assert checker.finish() == "Observ"
    assert checker.finish() == ""


def test_the_longest_of_two_that_end_together_counts() -> None:
    assert StopChecker(("END", "THE END")).add("it is THE END") == stopped("it is ", "THE END")


def test_the_first_to_be_completed_counts() -> None:
    assert StopChecker(("bcd", "c")).add("abcd") == stopped("ab", "c")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopChecker(("x", ""))


def test_a_long_hostile_stop_string_costs_one_pass() -> None:
    """Comparing every suffix with every prefix would take hours here."""
    checker = StopChecker(("a" * 100_000 + "b",))
    pieces = ["a" * 10] * 20_000
    shown = "".join(checker.add(piece).text for piece in pieces)
    assert shown + checker.finish() == "a" * 200_000
