"""Families whose objects and lists are tags within tags, named as their members are: MiniMax M3.

The arguments become a JSON object while they stream: strings in slices, other values when they are
complete. The schema says which JSON a text is, and whether a tag without any is a string, a list or
an object. A template leaves members out that are null.
"""

import json
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from server.parsing.answer import ToolFormat, all_calls
from server.parsing.json_schema import applied, kinds, listed
from server.parsing.lark import CallSyntax
from server.parsing.nested_call_grammars import ITEM, nested_call
from server.parsing.parameters import Parameters, parameters
from server.parsing.reader import CallArguments, Calls, NotACall, Reader, Reading
from server.parsing.tagged_calls import (
    EXACT,
    NAME,
    NAMED,
    Tag,
    Tags,
    as_json,
    attributes,
)

_BEFORE_TAGS = "]<]minimax[>["
"""MiniMax M3's token before each tag."""

_TAG = re.compile(r"<?[^<>\n]{0,1024}")
_CALL = "invoke "
_SECTION = "tool_call"
_MOST_UNENDED = 64  # tags whose ends are forgotten at a time
_MOST_APPLIED = 1000  # schemas of a list that are looked at for those of its items

_TAGS = Tags(
    call=Tag(f"{_BEFORE_TAGS}<{_CALL}", ">", f"{_BEFORE_TAGS}</invoke>"),
    parameter=Tag(f"{_BEFORE_TAGS}<", ">", f"{_BEFORE_TAGS}</"),
    heads=NAMED,
    trim=EXACT,
)


@dataclass(slots=True)
class _Open:
    """A tag that is open: the schema of its value, and what of that has been written."""

    name: str
    schema: Any
    written: Literal["nothing", "object", "list", "value"] = "nothing"
    n_items: int = 0
    space: str = ""
    """White space before what may be a tag: it is the value if there is none."""


class _Arguments:
    """The open tags of a call. What is written of its arguments is slices of a JSON object."""

    def __init__(self, calls: Calls, name: str) -> None:
        self._calls = calls
        self._name = name
        self._root = calls.schema(name)
        self._open = [_Open("", self._root)]
        self._members: dict[int, tuple[Any, Parameters]] = {}  # by identity of the schema, kept

    @property
    def last(self) -> _Open:
        """The tag that was opened last and is open."""
        return self._open[-1]

    def kinds(self) -> Set[str]:
        """The types that the last tag's value may have; none for any."""
        return kinds(self.last.schema, self._root)

    def begin(self, tag: str) -> str:
        """Open a tag. A tag that has a value already lacks its end."""
        text = ""
        if self.last.written == "value":
            text += self._end()
        parent = self.last
        if parent.written == "nothing":
            is_list = len(self._open) > 1 and self._is_list(tag)
            parent.written = "list" if is_list else "object"
            text += "[" if is_list else "{"
        else:
            text += ", "
        is_list = parent.written == "list"
        schema = self._item(parent) if is_list else self._member(parent, tag)
        self._open.append(_Open(tag, schema))
        return text if is_list else f"{text}{json.dumps(tag, ensure_ascii=False)}: "

    def end(self, tag: str) -> str:
        """Close the tag of this name and those within it; the last one if none has the name."""
        within = self._open[max(1, len(self._open) - _MOST_UNENDED) :]
        names = [one.name for one in reversed(within)]
        n_ended = names.index(tag) + 1 if tag in names else min(len(names), 1)
        return "".join(self._end() for _ in range(n_ended))

    def end_all(self) -> str:
        """Close all tags, and the object of the arguments."""
        return "".join(self._end() for _ in range(len(self._open)))

    def _end(self) -> str:
        one = self._open.pop()
        match one.written:
            case "object":
                return "}"
            case "list":
                return "]"
            case "value":
                return ""
        if not self._open:
            return "{}"
        allowed = kinds(one.schema, self._root)
        if not allowed or "string" in allowed:
            return json.dumps(one.space)
        empty = {"array": "[]", "object": "{}", "null": "null"}
        return next((text for name, text in empty.items() if name in allowed), '""')

    def _is_list(self, tag: str) -> bool:
        allowed = self.kinds()
        if tag == ITEM:
            return not allowed or "array" in allowed
        return "array" in allowed and "object" not in allowed

    def _member(self, parent: _Open, key: str) -> Any:
        if len(self._open) == 1:
            found = self._calls.parameter(self._name, key)
        elif isinstance(parent.schema, Mapping):
            schema = parent.schema
            if id(schema) not in self._members:
                self._members[id(schema)] = schema, parameters(schema, self._root)
            found = self._members[id(schema)][1].of(key)
        else:
            found = None
        return {} if found is None else found

    def _item(self, parent: _Open) -> Any:
        index = parent.n_items
        parent.n_items += 1
        found = [*islice(self._items(parent.schema, index), _MOST_APPLIED)]
        return found[0] if len(found) == 1 else {"anyOf": found} if found else {}

    def _items(self, schema: Any, index: int) -> Iterator[Any]:
        for branch in islice(applied(schema, self._root), _MOST_APPLIED):
            first = listed(branch, "prefixItems") or listed(branch, "items")
            if index < len(first):
                yield first[index]
            elif isinstance(branch.get("items"), Mapping):
                yield branch["items"]


def _read(reader: Reader, marker: str, calls: Calls) -> Reading[None]:
    """Calls up to the end of their section. What else is in it is dropped: it is no content."""
    yield from all_calls(reader, calls, f"{_BEFORE_TAGS}</{_SECTION}>", _read_calls(reader, calls))


def _read_calls(reader: Reader, calls: Calls) -> Reading[None]:
    yield from reader.skip_space()
    if not (yield from reader.starts([_BEFORE_TAGS])):
        raise NotACall
    tag = yield from _tag(reader)
    name = _called(tag)
    if not name:
        raise NotACall
    while True:
        if name:
            yield calls.begin(name)
            tag = yield from _read_arguments(reader, calls, name)
        else:
            _, found = yield from reader.collect([_BEFORE_TAGS])
            tag = (yield from _tag(reader)) if found else ""
        if tag in ("", f"/{_SECTION}"):
            return
        name = _called(tag)


def _tag(reader: Reader) -> Reading[str]:
    """A tag without its brackets, which follows. Raises NotACall where none does."""
    tag, _ = yield from reader.name([">"], _TAG)
    return tag.removeprefix("<").strip()


def _called(tag: str) -> str:
    """The name of the function whose call a tag begins; "" for another tag."""
    if not tag.startswith(_CALL):
        return ""
    name = attributes(tag.removeprefix(_CALL)).get("name", "")
    if not NAME.fullmatch(name):
        raise NotACall
    return name


def _read_arguments(reader: Reader, calls: Calls, name: str) -> Reading[str]:
    """A call's arguments. Returns the tag after them, consumed: the call's end is none. "" where
    the text ends.
    """
    arguments = _Arguments(calls, name)
    while True:
        _, found = yield from reader.collect([_BEFORE_TAGS])
        while found:
            tag = yield from _tag(reader)
            if tag in ("/invoke", f"/{_SECTION}") or tag.startswith(_CALL):
                yield calls.arguments(arguments.end_all())
                return tag
            if tag.startswith("/"):
                if text := arguments.end(tag[1:].strip()):
                    yield calls.arguments(text)
                break
            yield calls.arguments(arguments.begin(tag))
            found = yield from _read_text(reader, calls, arguments)
        if not found:
            return ""


def _read_text(reader: Reader, calls: Calls, arguments: _Arguments) -> Reading[str]:
    """The text after a tag, up to the next one, and what stands before that; "" where the text
    ends.
    """
    last, allowed = arguments.last, arguments.kinds()
    if allowed - {"null"} != {"string"}:
        text, found = yield from reader.collect([_BEFORE_TAGS])
        if text.strip() and found:
            last.written = "value"
            yield calls.arguments(as_json(text, allowed))
        last.space = text
        return found
    null = f"null{_BEFORE_TAGS}"
    if "null" in allowed:
        if (yield from reader.starts([null])):
            last.written = "value"
            yield calls.arguments("null")
            return _BEFORE_TAGS
        if reader.is_closed and null.startswith(reader.text):
            return ""
    if (yield from reader.starts([_BEFORE_TAGS])):
        return _BEFORE_TAGS
    last.written = "value"
    yield calls.arguments('"')

    def part(text: str) -> CallArguments:
        return calls.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    found = yield from EXACT.until(reader, _BEFORE_TAGS, part)
    if found:
        yield calls.arguments('"')
    return found


MINIMAX_M3 = ToolFormat(
    "minimax_m3",
    [f"{_BEFORE_TAGS}<{_SECTION}>"],
    _read,
    CallSyntax(
        nested_call(_TAGS, _BEFORE_TAGS),
        opens=f"{_BEFORE_TAGS}<{_SECTION}>\n",
        begin=_TAGS.call.begin + _TAGS.heads.call[0],
        end=f"{_TAGS.call.end}\n",
        closes=f"{_BEFORE_TAGS}</{_SECTION}>",
    ),
    ends=[f"{_BEFORE_TAGS}</{_SECTION}>"],
)
"""`]<]minimax[>[<invoke name="name">]<]minimax[>[<key>value]<]minimax[>[</key>`, lists as `<item>`
within `<key>`: MiniMax M3. Each tag follows `]<]minimax[>[`.
"""
