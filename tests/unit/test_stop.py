"""Stop strings: what a client sees of text that may end in one."""

import pytest

from engine.output.text import Checked, StopChecker


def test_text_without_stop_strings_passes_at_once() -> None:
    checker = StopChecker(())
    assert checker.add("anything") == Checked("anything")
    assert checker.finish() == ""


def test_a_stop_string_inside_one_piece_ends_the_text_before_it() -> None:
    assert StopChecker(("END",)).add("all of it END and more") == Checked("all of it ", "END")


def test_a_stop_string_spread_over_pieces_is_never_shown() -> None:
    checker = StopChecker(("\n\n",))
    assert checker.add("one\n") == Checked("one")
    assert checker.add("\ntwo") == Checked("", "\n\n")


def test_a_beginning_that_comes_to_nothing_is_released() -> None:
    checker = StopChecker(("<stop>",))
    assert checker.add("a<st") == Checked("a")
    assert checker.add("ray>") == Checked("<stray>")


def test_a_stop_string_may_begin_inside_a_failed_beginning() -> None:
    checker = StopChecker(("aab",))
    assert checker.add("aa") == Checked("")
    assert checker.add("a") == Checked("a")
    assert checker.add("b") == Checked("", "aab")


def test_what_is_held_back_comes_out_when_the_sequence_ends_otherwise() -> None:
    checker = StopChecker(("Observation:",))
    assert checker.add("so: Observ") == Checked("so: ")
    assert checker.finish() == "Observ"
    assert checker.finish() == ""


def test_the_longest_of_two_that_end_together_counts() -> None:
    assert StopChecker(("END", "THE END")).add("it is THE END") == Checked("it is ", "THE END")


def test_the_first_to_be_completed_counts() -> None:
    assert StopChecker(("bcd", "c")).add("abcd") == Checked("ab", "c")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopChecker(("x", ""))


def test_a_long_hostile_stop_string_costs_one_pass() -> None:
    """Comparing every suffix with every prefix would take hours here."""
    checker = StopChecker(("a" * 100_000 + "b",))
    pieces = ["a" * 10] * 20_000
    shown = "".join(checker.add(piece).text for piece in pieces)
    assert shown + checker.finish() == "a" * 200_000
