"""Arguments that are nearly JSON, as models write them, made into JSON while they stream.

Repaired is what has one reading: line breaks, tabs and other control characters in strings,
backslashes before characters that JSON does not escape, brackets that are missing before another
one or before a marker, brackets that were never opened, a comma before a bracket. All else passes
as it is.
"""

import re
from collections.abc import Callable

from server.parsing.reader import AnswerPart, Reader, Reading

_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_BETWEEN = re.compile(r'[^"{}\[\]<,\s]+')
_SPACE = re.compile(r"\s*")
_HEXADECIMAL = re.compile(r"[0-9a-fA-F]{4}")
_CONTROL = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\b": r"\b", "\f": r"\f"}
_OPENS = {"}": "{", "]": "["}
_CLOSES = {"{": "}", "[": "]"}


def read_object(reader: Reader, part: Callable[[str], AnswerPart]) -> Reading[bool]:
    """Pass a JSON object on, slice by slice, as JSON; whether it came to its end.

    `<` outside of strings begins a marker, and ends it: what is open there is closed. Where the
    text ends, what is open stays so.
    """
    repair = _Repair()
    while True:
        n_taken, text = repair.add(reader.text, is_last=reader.is_closed)
        reader.take(n_taken)
        if text:
            yield part(text)
        if repair.is_over:
            return True
        if reader.is_closed:
            return False
        yield None


def repaired(text: str) -> str:
    """A whole object as JSON; text that does not come to its end as it is."""
    repair = _Repair()
    _, written = repair.add(text, is_last=True)
    return written if repair.is_over else text


class _Repair:
    """What is open of an object, whose text comes in pieces."""

    def __init__(self) -> None:
        self.is_over = False
        self._open: list[str] = []
        self._in_string = False
        self._comma = ""  # with the space around it, until what follows is seen
        self._last = ""  # a bracket, comma or colon; "key", or "value"

    def add(self, text: str, *, is_last: bool) -> tuple[int, str]:
        """How much of the text has been read, and the JSON that it makes."""
        at, written = 0, list[str]()
        while at < len(text) and not self.is_over:
            end = (
                self._string(text, at, written, is_last=is_last)
                if self._in_string
                else self._between(text, at, written)
            )
            if end == at:
                break
            at = end
        return at, "".join(written)

    def _string(self, text: str, at: int, written: list[str], *, is_last: bool) -> int:
        """Read a run of a string's text, or one character. The same place: more text is needed."""
        if plain := _IN_STRING.match(text, at):
            written.append(plain[0])
            return plain.end()
        character = text[at]
        if character == '"':
            self._in_string = False
            written.append(character)
        elif character != "\\":
            written.append(_CONTROL.get(character, f"\\u{ord(character):04x}"))
        else:
            return self._escape(text, at, written, is_last=is_last)
        return at + 1

    def _escape(self, text: str, at: int, written: list[str], *, is_last: bool) -> int:
        n_needed = 6 if text[at + 1 : at + 2] == "u" else 2
        if len(text) - at < n_needed:
            if is_last:
                written.append(text[at:])
                return len(text)
            return at
        escaped = text[at + 1]
        if escaped == "u":
            written.append("\\" if _HEXADECIMAL.match(text, at + 2) else "\\\\")
            return at + 1
        if escaped in '"\\/bfnrt':
            written.append(text[at : at + 2])
        elif escaped == "'":
            written.append("'")
        else:
            written.append("\\\\")
            return at + 1
        return at + 2

    def _between(self, text: str, at: int, written: list[str]) -> int:
        """Read what is between strings."""
        if (space := _SPACE.match(text, at)) and space.end() > at:
            if self._comma:
                self._comma += space[0]
            else:
                written.append(space[0])
            return space.end()
        character = text[at]
        if character == ",":
            self._comma = character
        elif character in "}]":
            self._close(character, written)
        elif character == "<":
            if self._last not in ("key", ":"):  # else no value is the one that is missing
                written += [_CLOSES[one] for one in reversed(self._open)]
            self.is_over = True
            return at
        else:
            return self._value(text, at, written)
        return at + 1

    def _value(self, text: str, at: int, written: list[str]) -> int:
        """Read the begin of a string, of an object or of a list, or what is neither."""
        if self._comma:
            written.append(self._comma)
            self._comma, self._last = "", ","
        character = text[at]
        if character == '"':
            is_key = self._open[-1:] == ["{"] and self._last in ("{", ",")
            self._in_string, self._last = True, "key" if is_key else "value"
        elif character in "{[":
            self._open.append(character)
            self._last = character
        elif plain := _BETWEEN.match(text, at):
            self._last = ":" if plain[0].endswith(":") else "value"
            written.append(plain[0])
            return plain.end()
        written.append(character)
        return at + 1

    def _close(self, bracket: str, written: list[str]) -> None:
        """Close a bracket and those within it; drop one that was never opened."""
        opened = _OPENS[bracket]
        if opened not in self._open:
            return
        self._comma, self._last = "", "value"
        while (last := self._open.pop()) != opened:
            written.append(_CLOSES[last])
        written.append(bracket)
        self.is_over = not self._open
