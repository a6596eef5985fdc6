"""Parsers of JSON that arrives in pieces: values, and objects with a name and arguments.

Its text is passed on as written.
"""

import json
import re
from collections.abc import Callable

from server.json_size import whole_characters
from server.parsing import json_repair
from server.parsing.reader import (
    AnswerPart,
    BrokenCall,
    CallBegun,
    Calls,
    Content,
    NotACall,
    Reader,
    Reading,
    gathered,
)

_PLAIN = re.compile(r'[^"\\]*')
_BETWEEN = re.compile(r'[^"{}\[\]<]*')
_SCALAR = re.compile(r"[-+.\w]*")
_STRING = r'"(?:[^"\\]|\\.)*+'
_WHOLE = rf"[\s{{\[]*+(?:{_STRING}\"|[-+.\w]++)?+[\s}}\]]*+"
_CUT_OFF = re.compile(rf"(?:{_WHOLE}[,:])*+(?:{_WHOLE}|[\s{{\[]*+{_STRING}\\?)", re.DOTALL)
"""Values with a comma or colon between them, whatever their brackets, up to any place in one."""


def json_value(reader: Reader, part: Callable[[str], AnswerPart]) -> Reading[bool]:
    """Pass one JSON value on, slice by slice; whether it came to its end.

    It is not checked beyond its brackets and strings. What no JSON can contain ends it.
    """
    yield from reader.skip_space()
    first = reader.text[:1]
    if first not in ("{", "["):
        value, ended = yield from (json_string(reader) if first == '"' else _scalar(reader))
        if value:
            yield part(value)
        return ended
    depth, in_string = 0, False
    while True:
        end, depth, in_string, is_over = _scan(reader, depth, in_string)
        if end:
            yield part(reader.take(end))
        if is_over:
            return depth == 0
        if reader.is_closed:
            return False
        yield None


def json_string(reader: Reader) -> Reading[tuple[str, bool]]:
    """A whole JSON string as it stands, quotes included; whether it came to its end."""
    slices = [reader.take(1)]
    while True:
        at = 0
        while at < len(reader.text):
            match = _PLAIN.match(reader.text, at)
            at = match.end() if match else at
            if reader.text[at : at + 1] == '"':
                return "".join((*slices, reader.take(at + 1))), True
            if at + 2 > len(reader.text):
                break
            at += 2  # a backslash, and what it stands before
        slices.append(reader.take(len(reader.text) if reader.is_closed else at))
        if reader.is_closed:
            return "".join(slices), False
        yield None


def read_key(reader: Reader) -> Reading[str]:
    """A key and the colon after it. Raises NotACall."""
    yield from reader.skip_space()
    if reader.text[:1] != '"':
        raise NotACall
    key, _ = yield from json_string(reader)
    yield from reader.skip_space()
    if not (yield from reader.starts([":"])):
        raise NotACall
    return decoded_string(key)


def read_string(reader: Reader) -> Reading[str]:
    """A string's value. Raises NotACall."""
    yield from reader.skip_space()
    if reader.text[:1] != '"':
        raise NotACall
    text, _ = yield from json_string(reader)
    return decoded_string(text)


def is_cut_off(text: str) -> bool:
    """Whether a JSON value begins and does not come to its end, by its brackets and strings."""
    reader = Reader()
    reader.add(text)
    reader.close()
    steps = json_value(reader, Content)
    while True:
        try:
            if next(steps) is None:
                reader.advance()
        except StopIteration as stop:
            return not stop.value


def decoded_string(text: str) -> str:
    """The value of a JSON string. Raises NotACall."""
    try:
        value = json.loads(whole_characters(text), strict=False)
    except ValueError:
        raise NotACall from None
    if not isinstance(value, str):
        raise NotACall
    return value


def _scalar(reader: Reader) -> Reading[tuple[str, bool]]:
    """A number, true, false or null."""
    slices: list[str] = []
    while True:
        match = _SCALAR.match(reader.text)
        slices.append(reader.take(match.end() if match else 0))
        if reader.text or reader.is_closed:
            value = "".join(slices)
            return value, bool(value)
        yield None


def _scan(reader: Reader, depth: int, in_string: bool) -> tuple[int, int, bool, bool]:
    """The length of the text that belongs to the value, the state after it, and whether the value
    is complete.

    An escape that is cut off is left for the next time.
    """
    text, at = reader.text, 0
    while at < len(text):
        match = (_PLAIN if in_string else _BETWEEN).match(text, at)
        at = match.end() if match else at
        character = text[at : at + 1]
        if not character or (character == "\\" and at + 1 == len(text)):
            break
        if character == "<":
            return at, depth, in_string, True
        if character == "\\":
            at += 2
            continue
        at += 1
        if character == '"':
            in_string = not in_string
        else:
            depth += 1 if character in "{[" else -1
            if depth == 0:
                return at, depth, in_string, True
    return at, depth, in_string, False


_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_KNOWN = ("id", "type", "index", "tool_call_id")  # may come before the name, too


def read_object(reader: Reader, calls: Calls) -> Reading[None]:
    """`{"name": ..., "arguments": {...}}` after a marker, the keys in any order.

    Raises NotACall as long as the name has not been given out.
    """
    yield from _read_call(reader, calls, calls.begin)


def read_declared_object(reader: Reader, calls: Calls) -> Reading[None]:
    """Such an object where no marker says that it is a call. Raises NotACall unless its name is
    that of a function of the request: other objects have names, too.
    """
    yield from _read_call(reader, calls, calls.begin_declared)


def _read_call(reader: Reader, calls: Calls, begin: Callable[[str], CallBegun]) -> Reading[None]:
    yield from reader.skip_space()
    if not (yield from reader.starts(["{"])):
        raise NotACall
    name, early, given = "", "", False  # `early` are arguments that came before the name
    while True:
        key = yield from read_key(reader)
        if key in _NAMES and not name:
            name = yield from read_string(reader)
            yield begin(name)
        elif key in _ARGUMENTS and name:
            yield from read_arguments(reader, calls)
            given = True
        elif name:
            yield from whole_value(reader)
        elif key in _ARGUMENTS:
            early = yield from _value_before_name(reader)
        elif key in _KNOWN:
            yield from _value_before_name(reader)
        else:
            raise NotACall
        yield from reader.skip_space()
        if not (yield from reader.starts([","])):
            break
    if not name:
        raise NotACall
    yield from reader.starts(["}"])
    yield from drop_braces(reader)
    if not given:
        yield calls.arguments(_as_object(early))


def read_arguments(reader: Reader, calls: Calls) -> Reading[None]:
    """A JSON object as it stands; or one that was written into a string; or null for none."""
    yield from reader.skip_space()
    if (yield from reader.peek()) == "{":
        yield from json_repair.read_object(reader, calls.arguments)
    else:
        yield calls.arguments(_as_object((yield from whole_value(reader))))


def drop_braces(reader: Reader) -> Reading[None]:
    """Consume braces after an object that has been closed: a model has written one too many."""
    while True:
        space = yield from reader.skip_space()
        if not (yield from reader.starts(["}"])):
            reader.give_back(space)
            return


def whole_value(reader: Reader) -> Reading[str]:
    """A JSON value's text, when it is complete."""
    text, _ = yield from gathered(json_value(reader, Content))
    return text


def _value_before_name(reader: Reader) -> Reading[str]:
    """A JSON value's text. Raises BrokenCall if it does not come to its end and is not JSON so far:
    where a quote is missing or one too many, the text after it is taken for strings.
    """
    text, ended = yield from gathered(json_value(reader, Content))
    if not ended and not _CUT_OFF.fullmatch(text):
        raise BrokenCall
    return text


def _as_object(text: str) -> str:
    """Arguments that are not written as an object: one inside of a string, or none at all.

    What has no reading passes as it is: the client sees what the model wrote.
    """
    if text.startswith('"'):
        try:
            text = decoded_string(text)
        except NotACall:
            return text
        text = json_repair.repaired(text) if text.startswith("{") else text
    return "{}" if text in {"", "null"} else text
