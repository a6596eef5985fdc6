"""Families whose arguments are literals: Gemma's, in quotes of their own, and Python's. They are
converted to JSON while they stream.

Strings pass in slices, other values when they are complete. Where the text ends inside of an
object, that stays open: arguments that may lack their half must not look complete. `<` stands
only in strings: elsewhere it begins a marker, and all that is open before a marker is closed.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from server.parsing.answer import ReadCalls, ToolFormat, all_calls
from server.parsing.call_grammars import braced_call, json_keyword_call, keyword_call
from server.parsing.json_text import decoded_string, json_string
from server.parsing.lark import CallSyntax
from server.parsing.reader import (
    AnswerPart,
    Calls,
    Content,
    NotACall,
    Reader,
    Reading,
    gathered,
    held_back,
)

WriteJson: TypeAlias = Callable[[str], AnswerPart]
ReadString: TypeAlias = Callable[[Reader, str, WriteJson], Reading[bool]]
"""Reads what follows the quote, that quote given, and writes a JSON string. Returns whether it came
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
    """The notation of values: the quotes of strings and the brackets of lists. `whole` are the
    quotes of strings that are whole arguments, where those are read in another way.
    """

    quotes: Mapping[str, ReadString]
    lists: Sequence[str] = ("[",)
    whole: Mapping[str, ReadString] = field(default_factory=dict)


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
    """A key as a JSON string, and the marker after it, both consumed."""
    yield from reader.skip_space()
    if quote := (yield from reader.starts(list(notation.quotes))):
        key, ended = yield from gathered(notation.quotes[quote](reader, quote, Content))
        _, found = yield from reader.collect(markers)
        return key, found if ended else ""
    text, found = yield from reader.collect(markers)
    return f'"{quoted(text.strip())}"', found


def _value(reader: Reader, notation: Notation, part: WriteJson, depth: int) -> Reading[bool]:
    """One value, and whether it is complete."""
    yield from reader.skip_space()
    brackets = ["{", *notation.lists] if depth < _MOST_DEPTH else []
    quotes = notation.quotes if depth else {**notation.quotes, **notation.whole}
    begin = yield from reader.starts([*quotes, *brackets])
    if begin in quotes:
        return (yield from quotes[begin](reader, begin, part))
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


def _read_plain(reader: Reader, quote: str, part: WriteJson) -> Reading[bool]:
    """Text up to the next quote, in which nothing is escaped."""
    yield part('"')
    while True:
        end = reader.text.find(quote)
        held = 0 if reader.is_closed else held_back(reader.text, [quote])
        if text := reader.take(end if end >= 0 else len(reader.text) - held):
            yield part(quoted(text))
        if end >= 0:
            reader.take(len(quote))
            yield part('"')
            return True
        if reader.is_closed:
            return False
        yield None


def _read_json(reader: Reader, quote: str, part: WriteJson) -> Reading[bool]:
    """A string as JSON writes it, when it is complete."""
    reader.give_back(quote)
    text, ended = yield from json_string(reader)
    if ended:
        try:
            text = f'"{quoted(decoded_string(text))}"'
        except NotACall:
            text = f'"{quoted(text)}"'
        yield part(text)
    return ended


def _gemma(name: str, begin: str, end: str, quote: str, answers: str) -> ToolFormat:
    """Calls between `begin` and `end`. `answers` is what a model writes after the last of them,
    where it expects the results.
    """
    return ToolFormat(
        name,
        [begin],
        _gemma_reader(Notation({quote: _read_plain, '"': _read_json}), end, answers),
        CallSyntax(braced_call(quote), begin=f"{begin}call:", end=end),
        ends=[end],
    )


def _gemma_reader(notation: Notation, end: str, answers: str) -> ReadCalls:
    def read(reader: Reader, marker: str, calls: Calls) -> Reading[None]:
        if (yield from all_calls(reader, calls, end, _read_calls(reader, notation, calls))):
            yield from reader.starts([end])
            yield from reader.skip_space()
            yield from reader.starts([answers])

    return read


def _read_calls(reader: Reader, notation: Notation, calls: Calls) -> Reading[None]:
    """One call, and parallel ones after it; in braces, or as Python's."""
    yield from reader.skip_space()
    if not (yield from reader.starts(["call:"])):
        raise NotACall
    while True:
        name, bracket = yield from reader.name(["{", "("])
        yield calls.begin(name)
        if bracket == "{":
            yield from read_members(reader, notation, "}", ":", calls.arguments)
        else:
            quotes = {**_NOTATION.quotes, **notation.quotes}
            whole = {**_NOTATION.whole, **notation.quotes}
            either = Notation(quotes, _NOTATION.lists, whole)
            yield from read_members(reader, either, ")", "=", calls.arguments)
        yield from reader.skip_space()
        if not (yield from reader.starts(["call:"])):
            return


GEMMA4 = _gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")
"""`<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>`."""

FUNCTION_GEMMA = _gemma(
    "functiongemma",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<start_function_response>",
)
"""`<start_function_call>call:name{key:<escape>text<escape>,other:1}<end_function_call>`."""


_PIECE = re.compile(  # plain text, an escape, or what may be a quote
    r"[^\\'\"]+"
    r"|\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|[\s\S]?)"
    r"|['\"]"
)
_UNFINISHED = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|[0-7]{1,2})?")
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}
_SAME = "\\'\"/"  # the slash as in JSON, which some write
_KEY = r"[^=()\[\]{},\"'<]{1,256}"
_ODD_KEY = r"\"(?:[^\"\\]|\\.){0,256}"  # grammars write what Python has no form for
_GAP = r"\s{0,64}"


@dataclass(frozen=True, slots=True)
class _End:
    """What follows the quote that ends a string, and what may become that with more text."""

    following: re.Pattern[str]
    beginning: re.Pattern[str]


_IN_A_VALUE = _End(re.compile(rf"{_GAP}[,)\]}}:=]"), re.compile(rf"{_GAP}\Z"))
_FUNCTION = r"[\w.:/-]{1,256}"
_WHOLE_ARGUMENT = _End(
    re.compile(
        rf"{_GAP},{_GAP}(?:{_KEY}|{_ODD_KEY}\"{_GAP})=(?!=)"
        rf"|{_GAP},?{_GAP}\){_GAP}(?:[;\]<]|,{_GAP}{_FUNCTION}\()"
        rf"|{_GAP}\]{_GAP}<"
    ),
    re.compile(
        rf"{_GAP}(?:,{_GAP}(?:{_KEY}=?|{_ODD_KEY}\\?(?:\"{_GAP}=?)?)?"
        rf"|,?{_GAP}\){_GAP}(?:,{_GAP}(?:{_FUNCTION})?)?"
        rf"|\]{_GAP})?\Z"
    ),
)
"""Another argument, or the end of the call."""


def _python_string(ends: _End) -> ReadString:
    """Templates do not escape what they put between quotes. So a quote ends a string only where
    that follows which does in all of Python's literals: a comma, a colon, a bracket or `=`; and
    after a whole argument another one, or the end of the call.
    """

    def read(reader: Reader, quote: str, part: WriteJson) -> Reading[bool]:
        yield part('"')
        while True:
            text, end, is_over = _scan(reader.text, quote, ends, is_closed=reader.is_closed)
            reader.take(end)
            if text:
                yield part(quoted(text))
            if is_over:
                yield part('"')
                return True
            if reader.is_closed:
                return False
            yield None

    return read


def _scan(text: str, quote: str, ends: _End, *, is_closed: bool) -> tuple[str, int, bool]:
    """The decoded part of the text that is final, its end, and whether the string ends there."""
    said: list[str] = []
    at = 0
    while match := _PIECE.match(text, at):
        piece, end = match[0], match.end()
        if piece[0] == "\\":
            if not is_closed and _UNFINISHED.fullmatch(text, at):
                break
            piece = _unescaped(piece[1:])
        elif text.startswith(quote, at):
            after = at + len(quote)
            if ends.following.match(text, after):
                return "".join(said), after, True
            if ends.beginning.match(text, after):
                return "".join(said), after if is_closed else at, is_closed
        elif quote.startswith(text[at : at + len(quote)]) and not is_closed:
            break
        said.append(piece)
        at = end
    return "".join(said), at, False


def _unescaped(escape: str) -> str:
    """The character of an escape, given without its backslash. An unknown escape stands for
    itself.
    """
    if escape[:1] in ("x", "u", "U") and len(escape) > 1:
        code = int(escape[1:], 16)
        return chr(code) if code < 0x110000 else "\\" + escape
    if escape.isascii() and escape.isdigit() and escape[0] < "8":
        return chr(int(escape, 8))
    if escape in _SAME:
        return escape
    return _SIMPLE.get(escape, "\\" + escape)


_QUOTES = ('"', "'", '"""', "'''")
_NOTATION = Notation(
    dict.fromkeys(_QUOTES, _python_string(_IN_A_VALUE)),
    lists=("[", "("),
    whole=dict.fromkeys(_QUOTES, _python_string(_WHOLE_ARGUMENT)),
)
_FIRST = re.compile(rf"\)|(?:{_KEY}|{_ODD_KEY}\"\s{{0,64}})=[^=]")
_MAY_BE_FIRST = re.compile(rf"(?:{_KEY})?=?|{_ODD_KEY}\\?(?:\"\s{{0,64}}=?)?")


def _pythonic_reader(end: str) -> ReadCalls:
    """Reads a list of calls, and `end` after it."""

    def read(reader: Reader, marker: str, calls: Calls) -> Reading[None]:
        steps = _read_list(reader, marker, calls)
        if marker == "[":
            yield from steps
        elif not (yield from all_calls(reader, calls, end, steps)):
            return
        yield from reader.skip_space()
        yield from reader.starts([end])

    return read


def _read_list(reader: Reader, marker: str, calls: Calls) -> Reading[None]:
    yield from reader.skip_space()
    if marker != "[" and not (yield from reader.starts(["["])):
        raise NotACall
    while True:
        name, _ = yield from reader.name(["("])
        if marker == "[" and not calls.declares(name):
            raise NotACall  # text may begin with a bracket, too
        yield from _check_arguments(reader)
        yield calls.begin(name)
        yield from read_members(reader, _NOTATION, ")", "=", calls.arguments)
        yield from reader.skip_space()
        if not (yield from reader.starts([","])):
            break
    yield from reader.starts(["]"])


def _check_arguments(reader: Reader) -> Reading[None]:
    """Raises NotACall unless there is none, or one with a keyword comes first."""
    yield from reader.skip_space()
    while not _FIRST.match(reader.text):
        if reader.is_closed or not _MAY_BE_FIRST.fullmatch(reader.text):
            raise NotACall
        yield None


LFM2 = ToolFormat(
    "lfm2",
    ["<|tool_call_start|>"],
    _pythonic_reader("<|tool_call_end|>"),
    CallSyntax(
        keyword_call,
        opens="<|tool_call_start|>[",
        between=", ",
        closes="]<|tool_call_end|>",
    ),
    ends=["<|tool_call_end|>"],
)
"""`<|tool_call_start|>[name(key="value")]<|tool_call_end|>`: Liquid's LFM2."""

_OLMO3_END = "</function_calls>"


def _read_olmo3(reader: Reader, marker: str, calls: Calls) -> Reading[None]:
    """Calls on lines of their own, up to the end marker."""
    if (yield from all_calls(reader, calls, _OLMO3_END, _read_lines(reader, calls))):
        yield from reader.skip_space()
        yield from reader.starts([_OLMO3_END])


def _read_lines(reader: Reader, calls: Calls) -> Reading[None]:
    notation = Notation(_NOTATION.quotes, _NOTATION.lists)  # its quotes within strings are escaped
    while True:
        name, _ = yield from reader.name(["("])
        yield from _check_arguments(reader)
        yield calls.begin(name)
        yield from read_members(reader, notation, ")", "=", calls.arguments)
        yield from reader.skip_space()
        yield from reader.starts([",", ";"])
        yield from reader.skip_space()
        if (yield from reader.peek()) in ("", "<"):
            return


OLMO3 = ToolFormat(
    "olmo3",
    ["<function_calls>"],
    _read_olmo3,
    CallSyntax(json_keyword_call, opens="<function_calls>", between="\n", closes=_OLMO3_END),
    ends=[_OLMO3_END],
)
"""`<function_calls>name(key="value")</function_calls>`, a line for each call, and values in JSON:
Ai2's OLMo 3.
"""

PYTHONIC = ToolFormat(
    "pythonic",
    ["<|python_start|>"],
    _pythonic_reader("<|python_end|>"),
    CallSyntax(keyword_call, opens="[", between=", ", closes="]"),
    leading=["["],
    ends=["<|python_end|>"],
)
"""The list in place of an answer: Llama 4, and 3.2's small ones."""
