"""Parsers of JSON objects with a name and arguments. The arguments are passed on as written."""

from server.parsing.calls import Calls
from server.parsing.json_text import decoded_string, json_value, read_key, read_string
from server.parsing.parts import Content
from server.parsing.reader import NotACall, Reader, Reading, gathered

_ARGUMENTS = ("arguments", "parameters")
_KNOWN = ("id", "type", "index")  # may come before the name, too


def read_object(reader: Reader, calls: Calls) -> Reading[None]:
    """`{"name": ..., "arguments": {...}}`, the keys in any order.

    Raises NotACall as long as the name has not been given out.
    """
    yield from reader.skip_space()
    if not (yield from reader.starts(["{"])):
        raise NotACall
    name, early, given = "", "", False  # `early` are arguments that came before the name
    while True:
        key = yield from read_key(reader)
        if key == "name" and not name:
            name = yield from read_string(reader)
            yield calls.begin(name)
        elif key in _ARGUMENTS and name:
            yield from read_arguments(reader, calls)
            given = True
        elif key in _ARGUMENTS:
            early = yield from whole_value(reader)
        elif name or key in _KNOWN:
            yield from whole_value(reader)
        else:
            raise NotACall
        yield from reader.skip_space()
        if not (yield from reader.starts([","])):
            break
    if not name:
        raise NotACall
    yield from reader.starts(["}"])
    if not given:
        yield calls.arguments(_as_object(early))


def read_arguments(reader: Reader, calls: Calls) -> Reading[None]:
    """A JSON object as it stands; or one that was written into a string; or null for none."""
    yield from reader.skip_space()
    if (yield from reader.peek()) == "{":
        yield from json_value(reader, calls.arguments)
    else:
        yield calls.arguments(_as_object((yield from whole_value(reader))))


def whole_value(reader: Reader) -> Reading[str]:
    """A JSON value's text, when it is complete."""
    text, _ = yield from gathered(json_value(reader, Content))
    return text


def _as_object(text: str) -> str:
    """Arguments that are not written as an object: one inside of a string, or none at all.

    What is broken passes as it is: the client sees what the model wrote.
    """
    if text.startswith('"'):
        try:
            text = decoded_string(text)
        except NotACall:
            return text
    return "{}" if text in {"", "null"} else text
