"""Objects in notations of models' own, converted to JSON while they stream.

Strings pass in slices, other values when they are complete. Where the text ends inside of an
object, that stays open: arguments that may lack their half must not look complete. `<` stands
only in strings: elsewhere it begins a marker, and all that is open before a marker is closed.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from server.parsing.parts import AnswerPart, Content
from server.parsing.reader import Reader, Reading, gathered

WriteJson: TypeAlias = Callable[[str], AnswerPart]
ReadString: TypeAlias = Callable[[Reader, str, WriteJson], Reading[bool]]
"""Reads what stands behind the quote, that quote given, and writes a JSON string; whether it came
to its end."""

_MOST_DEPTH = 64  # brackets inside of each other; what is deeper is passed on as a string
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_PYTHON_NUMBER = re.compile(r"[-+]?[\d.][\w.+-]{0,63}", re.ASCII)
_WORDS = {"True": "true", "False": "false", "None": "null"} | {
    word: word for word in ("true", "false", "null")
}
_BARE = re.compile(r"[^,<()\[\]{}]*")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Notation:
    """How values are written: strings between quotes, and which of the brackets lists have."""

    quotes: Mapping[str, ReadString]
    lists: Sequence[str] = ("[",)


def read_members(
    reader: Reader, notation: Notation, end: str, assign: str, part: WriteJson, depth: int = 0
) -> Reading[bool]:
    """Keys, `assign`, and values up to `end`, as a JSON object; whether that came to its end.

    What is no key with a value is dropped.
    """
    yield part("{")
    comma = ""
    while True:
        key, found = yield from _key(reader, notation, [assign, ",", end, "<"])
        if not found:
            return False
        if found in (end, "<"):
            reader.give_back(found if found == "<" else "")
            yield part("}")
            return True
        if found == assign:
            yield part(f"{comma}{key}: ")
            comma = ", "
            if not (yield from _value(reader, notation, part, depth)):
                return False


def quoted(text: str) -> str:
    """The text inside of a JSON string. Half of a character, which has no UTF-8, is an escape."""
    inside = json.dumps(text, ensure_ascii=False)[1:-1]
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", inside)


def scalar(text: str) -> str:
    """JSON for a number or a word of JSON or Python; text that is neither is a string."""
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text):
        return text
    if _PYTHON_NUMBER.fullmatch(text):
        try:
            return json.dumps(float(text) if "." in text else int(text, 0), allow_nan=False)
        except ValueError:
            pass
    return f'"{quoted(text)}"'


def _key(reader: Reader, notation: Notation, markers: Sequence[str]) -> Reading[tuple[str, str]]:
    """A key as a JSON string, and the marker behind it, both consumed."""
    yield from reader.skip_space()
    if quote := (yield from reader.starts(list(notation.quotes))):
        key, ended = yield from gathered(notation.quotes[quote](reader, quote, Content))
        _, found = yield from reader.collect(markers)
        return key, found if ended else ""
    text, found = yield from reader.collect(markers)
    return f'"{quoted(text.strip())}"', found


def _value(reader: Reader, notation: Notation, part: WriteJson, depth: int) -> Reading[bool]:
    """One value; whether it came to its end."""
    yield from reader.skip_space()
    brackets = ["{", *notation.lists] if depth < _MOST_DEPTH else []
    begin = yield from reader.starts([*notation.quotes, *brackets])
    if begin in notation.quotes:
        return (yield from notation.quotes[begin](reader, begin, part))
    if begin == "{":
        return (yield from read_members(reader, notation, "}", ":", part, depth + 1))
    if begin:
        return (yield from _items(reader, notation, part, depth + 1))
    text = yield from _bare(reader)
    if text is None:
        return False
    yield part(scalar(text.strip()))
    return True


def _items(reader: Reader, notation: Notation, part: WriteJson, depth: int) -> Reading[bool]:
    """The rest of a list, which any bracket ends."""
    yield part("[")
    comma = ""
    while True:
        yield from reader.skip_space()
        quote = yield from reader.starts(list(notation.quotes))  # it may begin as a marker does
        reader.give_back(quote)
        following = quote or (yield from reader.peek())
        if not following:
            return False
        if following in tuple(")]}<"):
            reader.take(0 if following == "<" else 1)
            yield part("]")
            return True
        if following == ",":
            reader.take(1)
            continue
        if comma:
            yield part(comma)
        comma = ", "
        if not (yield from _value(reader, notation, part, depth)):
            return False


def _bare(reader: Reader) -> Reading[str | None]:
    """Text up to a comma or a bracket that it has not opened; None if the text ends before."""
    slices: list[str] = []
    depth = 0
    while True:
        text, at = reader.text, 0
        while at < len(text):
            match = _BARE.match(text, at)
            at = match.end() if match else at
            following = text[at : at + 1]
            if following == "<" or (depth == 0 and following in tuple(",)]}")):
                return "".join((*slices, reader.take(at)))
            depth += (following in tuple("([{")) - (following in tuple(")]}"))
            at += len(following)
        slices.append(reader.take(at))
        if reader.is_closed:
            return None
        yield None
