"""How the chat breaks the lines of an answer that comes in pieces."""

import re

import pytest

from server.terminal.chat_screen import WordWrap

WIDTH = 20


def shown(text: str, piece_size: int) -> list[str]:
    """The lines on a terminal that knows two control sequences: back, and erase to the end."""
    wrap, lines = WordWrap(), [""]
    for start in range(0, len(text), piece_size):
        printed = wrap.take(text[start : start + piece_size], WIDTH)
        for back, rest in re.findall(r"\x1b\[(\d+)D\x1b\[K|([^\x1b])", printed):
            if back:
                lines[-1] = lines[-1][: -int(back)]
            elif rest == "\n":
                lines.append("")
            else:
                lines[-1] += rest
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("piece_size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("The quick brown fox jumps.", ["The quick brown fox", "jumps."]),
        ("one  two\n\n  indented text\n", ["one  two", "", "  indented text", ""]),
        ("an internationalization", ["an", "internationalization"]),
        ("x" * 50 + " end", ["x" * 50, "end"]),
        ("a\tb", ["a    b"]),
        ("木" * 12 + " ok", ["木" * 9, "木木木 ok"]),
        ("ten 🌳🌳🌳🌳🌳🌳🌳🌳 trees", ["ten 🌳🌳🌳🌳🌳🌳🌳", "🌳 trees"]),
        ("", [""]),
    ],
)
def test_lines_break_at_words_whatever_the_pieces(
    text: str, lines: list[str], piece_size: int
) -> None:
    assert shown(text, piece_size) == lines


def test_a_word_is_seen_before_it_ends() -> None:
    assert WordWrap().take("Hel", WIDTH) == "Hel"
