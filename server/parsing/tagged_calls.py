"""Calls whose parameters are untyped text between tags: how a family marks them, and their parser.
The schema says which JSON a text is. Grammars of the same tags are in call_grammars.py.

The arguments become a JSON object while they stream: strings in slices, other values when
they are complete. Where the text ends inside of a call, as one that is cut by `max_tokens` does,
the object stays open: arguments that may lack their half must not look complete.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, TypeAlias

from server.parsing.answer import ReadCalls, all_calls
from server.parsing.json_schema import kind, kinds
from server.parsing.json_text import json_value, read_arguments
from server.parsing.lark import ANY_TEXT
from server.parsing.reader import (
    AnswerPart,
    CallArguments,
    Calls,
    Content,
    NotACall,
    Reader,
    Reading,
    first_marker,
    gathered,
    held_back,
)

Attributes: TypeAlias = Mapping[str, str]

NAME = re.compile(r"[\w.:/-]{1,256}")
HEAD = re.compile(r"[^<>\n]{1,1024}")
"""Most characters of a tag, which also bounds the time of reading it."""

_ATTRIBUTE = re.compile(r"""(\w+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'<>]+))""")


def attributes(head: str) -> Attributes:
    """`name="value"` pairs; the quotes may be missing."""
    return {name: a or b or c for name, a, b, c in _ATTRIBUTE.findall(head)}


def only_name(head: str) -> Attributes:
    """A head that is a name and no more."""
    return {"name": head.strip()}


def by_schema(attributes: Attributes) -> Set[str] | None:
    """None: the tags do not name the type of a value, so the schema determines it."""
    return None


@dataclass(frozen=True, slots=True)
class Heads:
    """The head of a tag, which names a function or parameter.

    A head is read as attributes, of which `name` and `key` are the function's and the parameter's
    name. `kinds` says which types of JSON the head of a parameter allows, or None where the schema
    is to say that. A model writes `call` around a function's name, and what `parameter` makes of a
    key and the type of its value.
    """

    read: Callable[[str], Attributes]
    call: tuple[str, str]
    parameter: Callable[[str, str], str]
    pattern: re.Pattern[str] = HEAD
    name: str = "name"
    key: str = "name"
    kinds: Callable[[Attributes], Set[str] | None] = by_schema


BARE = Heads(only_name, ("", ""), lambda key, kind: key, pattern=NAME)
"""The name and no more."""

NAMED = Heads(attributes, ('name="', '"'), lambda key, kind: f'name="{key}"')
"""An attribute `name`."""


@dataclass(frozen=True, slots=True)
class Tag:
    """`begin`, a head, `head_end`, what is inside, `end`.

    Without a `head_end` the head goes up to the first tag inside, or to `end`.
    """

    begin: str
    head_end: str
    end: str


@dataclass(frozen=True, slots=True)
class Section:
    """The tags around calls. A section has `calls` of them."""

    begin: str
    end: str
    calls: Literal["one", "all"] = "all"


@dataclass(frozen=True, slots=True)
class Quotes:
    """Text that matches the pattern, between `begin` and `end`; the end is not in the text."""

    begin: str = ""
    pattern: str = ANY_TEXT
    end: str = ""


ReadValue: TypeAlias = Callable[[Reader, str, Callable[[str], AnswerPart]], Reading[str]]
"""Reads a value up to its end tag, which is given, and returns that; "" where the text ends."""


@dataclass(frozen=True, slots=True)
class Trim:
    """Text around a string that does not belong to it: `begin` consumes it in front of the string,
    and `until` drops it between the string and its end tag. A model writes `written` on either
    side. All else is the string's, white space included: an edit of a file depends on it.
    """

    begin: Callable[[Reader], Reading[str]]
    until: ReadValue
    written: str = ""


def _until(kept: Callable[[str], int]) -> ReadValue:
    """`kept` says how much belongs to the value if the text ends there or the tag follows."""

    def until(reader: Reader, end: str, part: Callable[[str], AnswerPart]) -> Reading[str]:
        while True:
            at = reader.text.find(end)
            before = at if at >= 0 else len(reader.text) - held_back(reader.text, [end])
            if free := kept(reader.text[:before]):
                yield part(reader.take(free))
            if at >= 0:
                reader.take(at - free + len(end))
                return end
            if reader.is_closed:
                reader.take(len(reader.text))
                return ""
            yield None

    return until


MOST_NEXT_PARAMETERS = 32
"""Names of parameters that are looked for within the text of another one."""


def _until_line(tags: "Tags", lines: Sequence[str]) -> "Tags":
    """The tags, with which a value ends also where one of the lines begins another parameter: a
    model has forgotten the end tag.
    """
    if not lines:
        return tags

    def until(reader: Reader, end: str, part: Callable[[str], AnswerPart]) -> Reading[str]:
        markers = [end, *lines]
        while True:
            found = first_marker(reader.text, markers)
            n_before = found[0] if found else len(reader.text) - held_back(reader.text, markers)
            is_end = found is None or found[1] == end
            text = reader.text[:n_before]
            if free := len(text.removesuffix("\n") if is_end else text):
                yield part(reader.take(free))
            if found:
                reader.take(n_before - free + len(found[1]))
                if not is_end:
                    reader.give_back(found[1])
                return end
            if reader.is_closed:
                reader.take(len(reader.text))
                return ""
            yield None

    return replace(tags, trim=replace(tags.trim, until=until))


_CDATA_BEGIN = "<![CDATA["


def _before_cdata(reader: Reader) -> Reading[str]:
    """Skip white space before a CDATA section; elsewhere it is the value's."""
    space = yield from reader.skip_space()
    begin = yield from reader.starts([_CDATA_BEGIN])
    if not begin and not _is_cut(reader, [_CDATA_BEGIN]):
        begin, space = space, ""
    reader.give_back(begin)
    return space


def _until_in_cdata(reader: Reader, end: str, part: Callable[[str], AnswerPart]) -> Reading[str]:
    if not (yield from reader.starts([_CDATA_BEGIN])):
        if _is_cut(reader, [_CDATA_BEGIN]):
            return ""
        return (yield from EXACT.until(reader, end, part))
    yield from EXACT.until(reader, "]]>", part)
    _, found = yield from reader.collect([end])
    return found


def _is_cut(reader: Reader, options: Sequence[str]) -> bool:
    """Whether the text ends before it is seen if one of the options stands there."""
    return reader.is_closed and any(option.startswith(reader.text) for option in options)


LINES = Trim(
    lambda reader: reader.starts(["\n"]),
    _until(lambda text: len(text.removesuffix("\n"))),
    written="\n",
)
"""One line break on either side."""

PYTHON_WORDS = {"null": "None", "true": "True", "false": "False"}
"""Templates that convert a value to a string write these."""

EXACT = Trim(lambda reader: reader.starts([]), _until(len))
"""Nothing."""

CDATA = Trim(_before_cdata, _until_in_cdata)
"""Everything around a CDATA section; nothing where there is none."""


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of calls and parameters of a model family. A `section` may enclose calls.

    `value_begin` is a tag of its own between a parameter's head and its value. `undeclared` is the
    schema of parameters that the request does not declare. `whole` is a tag for all arguments as
    one JSON object. Between tags a model writes `line`, and strings between one of the `quotes`.
    `words` are what the template writes for null, true and false, where that is not JSON's.
    """

    call: Tag
    parameter: Tag
    heads: Heads
    trim: Trim
    section: Section | None = None
    value_begin: str = ""
    undeclared: Mapping[str, Any] = field(default_factory=dict)
    whole: Tag | None = None
    line: str = ""
    quotes: Sequence[Quotes] = (Quotes(),)
    words: Mapping[str, str] = field(default_factory=dict)

    def parameter_lines(self, keys: Sequence[str]) -> Sequence[str]:
        """The lines with which parameters of these names begin, where such a line is no text."""
        if self.trim is not LINES or self.value_begin:
            return ()
        return [f"\n{self.opening(key, 'string')}" for key in keys]

    def opening(self, key: str, kind: str) -> str:
        """The text before a parameter's value of that type."""
        between = self.line + self.value_begin if self.value_begin else ""
        head = self.heads.parameter(key, kind) + self.parameter.head_end
        return self.parameter.begin + head + between + self.trim.written


def tagged_calls(tags: Tags) -> ReadCalls:
    """A reader of calls that are marked like this."""
    end = tags.section.end if tags.section else tags.call.end

    def read(reader: Reader, marker: str, calls: Calls) -> Reading[None]:
        yield from all_calls(reader, calls, end, _read_section(reader, marker, calls, tags))

    return read


def _read_section(reader: Reader, marker: str, calls: Calls, tags: Tags) -> Reading[None]:
    """Calls up to the end of their section; only those side by side if the marker was no section's.

    What else is in a section is dropped: it is no content.
    """
    begin = tags.call.begin
    if marker != begin:
        yield from reader.skip_space()
        if not (yield from reader.starts([begin])):
            raise NotACall
    while True:
        yield from _read_call(reader, calls, tags)
        if not tags.section:
            return
        section = tags.section
        if marker == section.begin:
            _, found = yield from reader.collect([begin, section.end, section.begin])
        else:
            yield from reader.skip_space()
            found = yield from reader.starts([begin, section.end])
        if found == section.begin:
            reader.give_back(found)
        if found != begin:
            return


class _Arguments:
    """Writes the arguments of the call that began last as a JSON object.

    A key that comes again is written again: readers of JSON take the last one.
    """

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.is_empty = True
        self.keys = set[str]()

    def text(self, text: str) -> CallArguments:
        """A slice of a string."""
        return self.calls.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def value(self, key: str, text: str) -> CallArguments:
        """A key and its value, or the begin of that."""
        self.keys.add(key)
        before = "{" if self.is_empty else ", "
        self.is_empty = False
        return self.calls.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: {text}")

    def end(self, text: str = "}") -> CallArguments:
        """The end of a string or, without one, of the object."""
        return self.calls.arguments("{}" if self.is_empty else text)


def _read_call(reader: Reader, calls: Calls, tags: Tags) -> Reading[None]:
    """A call, the begin of its tag consumed. Raises NotACall as long as it has no name.

    What is between parameters is dropped. A tag that only the next call can have ends this one.
    """
    call, whole, parameter = tags.call, tags.whole, tags.parameter
    inside = [parameter.begin, call.end]
    separators = [call.head_end] if call.head_end else [*inside, *_closing(parameter, tags)]
    head, found = yield from reader.name(separators, tags.heads.pattern)
    if found in inside:
        reader.give_back(found)
    name = tags.heads.read(head).get(tags.heads.name, "")
    if not NAME.fullmatch(name):
        raise NotACall
    yield calls.begin(name)
    arguments = _Arguments(calls)
    after = [call.begin]
    if tags.section:
        after += [tags.section.begin, tags.section.end]
    while True:
        _, found = yield from reader.collect(
            [*inside, *after, *([whole.begin] if whole and arguments.is_empty else [])]
        )
        if found == parameter.begin:
            yield from _read_parameter(reader, arguments, tags, calls, name)
        elif whole and found == whole.begin:
            yield from reader.collect([whole.head_end])
            yield from read_arguments(reader, calls)
            yield from reader.collect([call.end])
            return
        else:
            break
    if found:
        yield arguments.end()
    if found in after:
        reader.give_back(found)


def _closing(parameter: Tag, tags: Tags) -> Sequence[str]:
    """Tags that a slip puts where a parameter begins or ends."""
    return [*filter(None, (parameter.head_end, tags.value_begin, parameter.end))]


def _read_parameter(
    reader: Reader, arguments: _Arguments, tags: Tags, calls: Calls, name: str
) -> Reading[None]:
    """A parameter, the begin of its tag consumed. One without a name is dropped."""
    head, found = yield from reader.collect([tags.parameter.head_end])
    if not (found and HEAD.fullmatch(head.strip())):
        return
    if tags.value_begin:
        yield from reader.skip_space()
        if not (yield from reader.starts([tags.value_begin])):
            return
    attributes = tags.heads.read(head)
    key = attributes.get(tags.heads.key)
    if key is None:
        return
    allowed = tags.heads.kinds(attributes)
    if allowed is None:
        declared = calls.parameter(name, key)
        allowed = kinds(tags.undeclared if declared is None else declared, calls.schema(name))
    others = [one for one in calls.parameter_names(name) if one not in {key, *arguments.keys}]
    lines = tags.parameter_lines(others[:MOST_NEXT_PARAMETERS])
    yield from _read_value(reader, arguments, key, _until_line(tags, lines), allowed)


def _read_value(
    reader: Reader, arguments: _Arguments, key: str, tags: Tags, allowed: Set[str]
) -> Reading[None]:
    """A value of one of the allowed types. A string is passed on as it comes, unless it is null."""
    end = tags.parameter.end
    yield from tags.trim.begin(reader)
    if allowed - {"null"} != {"string"}:
        value = yield from _read_json(reader, end, arguments)
        text, found = yield from gathered(tags.trim.until(reader, end, Content))
        if found:
            yield arguments.value(key, as_json(value + text, allowed))
        return
    words = {"null", tags.words.get("null", "null")} if "null" in allowed else set()
    nulls = [word + line + end for word in sorted(words) for line in ("", "\n")]
    if (yield from reader.starts(nulls)):
        yield arguments.value(key, "null")
        return
    if _is_cut(reader, nulls):
        return
    yield arguments.value(key, '"')
    if (yield from tags.trim.until(reader, end, arguments.text)):
        yield arguments.end('"')


def _read_json(reader: Reader, end: str, arguments: _Arguments) -> Reading[str]:
    """The object or list that begins here, consumed: an end tag in one of its strings is text. ""
    if there is none.

    A broken value, such as a string without its quote, ends at the first end tag. To find that out
    takes all the text that follows, so it is done once in an answer, and the work stays linear.
    """
    if arguments.calls.has_broken_json:
        return ""
    space = yield from reader.skip_space()
    if (yield from reader.peek()) not in {"{", "["}:
        reader.give_back(space)
        return ""
    text, is_whole = yield from gathered(json_value(reader, Content))
    if is_whole and (end not in text or _as_written(text) is not None):
        return space + text
    arguments.calls.has_broken_json = end in text
    reader.give_back(space + text)
    return ""


_MOST_LITERAL = 10_000  # characters that are tried as a Python literal: that takes 24 ms


_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


def as_json(text: str, allowed: Set[str]) -> str:
    """The text as JSON of one of the allowed kinds, or of any if none is.

    Text that is nothing else is a string. JSON stays as it is written; Python's words and literals,
    which models write too, become JSON.
    """
    source = _as_written(text.strip())
    if source is None:
        return json.dumps(text, ensure_ascii=False)
    value = json.loads(source)
    if "integer" in allowed and isinstance(value, float) and value.is_integer():
        return str(int(value))
    if _is_of(value, allowed - {"string"}):
        return source
    return json.dumps(text, ensure_ascii=False) if "string" in allowed else source


def _is_of(value: Any, allowed: Set[str]) -> bool:
    name = kind(value)
    return not allowed or name in allowed or (name == "integer" and "number" in allowed)


def _as_written(text: str) -> str | None:
    """The text as JSON, whatever it says; None if it says nothing in JSON or in Python."""
    source = _WORDS.get(text.lower(), text)
    try:
        json.loads(source, parse_constant=_refuse)
        return source
    except (ValueError, RecursionError):
        pass
    if len(text) > _MOST_LITERAL:
        return None
    try:
        return json.dumps(ast.literal_eval(text), allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)  # NaN and Infinity, which JSON does not have
