"""Stop strings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.output.text import StopChecker, TextDelta
from engine.values.output import FinishReason


def stopped(text: str, by: str) -> TextDelta:
    return TextDelta(text, FinishReason.STOP, by)


def test_a_stop_string_spread_over_pieces_is_never_shown() -> None:
    checker = StopChecker(("\n\n",))
    assert checker.add("one\n") == TextDelta("one")
    assert checker.add("\ntwo") == stopped("", "\n\n")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopChecker(("x", ""))


def test_a_long_hostile_stop_string_costs_one_pass() -> None:
    """Comparing every suffix with every prefix would take hours here."""
    checker = StopChecker(("a" * 100_000 + "b",))
    pieces = ["a" * 10] * 20_000
    shown = "".join(checker.add(piece).text for piece in pieces)
    assert shown + checker.finish() == "a" * 200_000


ALPHABET = "ab"  # so that beginnings overlap


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Whole text in hand: end before the stop string that is completed first."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def shown(pieces: list[str], stops: list[str]) -> tuple[str, str | int | None]:
    checker = StopChecker(tuple(stops))
    text = ""
    for piece in pieces:
        checked = checker.add(piece)
        text += checked.text
        if checked.stopped_by is not None:
            return text, checked.stopped_by
    return text + checker.finish(), None


stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)
piece_lists = st.lists(st.text(ALPHABET, max_size=6), max_size=12)


@given(pieces=piece_lists, stops=stop_lists)
def test_pieces_show_what_the_whole_text_would(pieces: list[str], stops: list[str]) -> None:
    assert shown(pieces, stops) == reference("".join(pieces), stops)


@given(pieces=piece_lists, stops=stop_lists)
def test_no_more_is_held_back_than_could_begin_a_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    checker = StopChecker(tuple(stops))
    text = released = ""
    for piece in pieces:
        text += piece
        checked = checker.add(piece)
        if checked.stopped_by is not None:
            return
        released += checked.text
        held = text[len(released) :]
        assert text == released + held
        beginnings = [text[len(text) - n :] for n in range(1, 5) if n <= len(text)]
        longest = max(
            (len(b) for b in beginnings if any(s != b and s.startswith(b) for s in stops)),
            default=0,
        )
        assert len(held) == longest
