"""Values that are costly to read for their size, as JSON text."""

import json
from collections.abc import Callable
from typing import Any, TypeAlias

from tests.hostile.fields import Field

Shape: TypeAlias = Callable[[int], str]
"""Writes the JSON of a value of about that many bytes."""

DEEP = 190
"""Levels, just below the most that a body may have."""
STEPS = 16_000


def repeated(text: str, before: str = "", after: str = "", between: str = "") -> Shape:
    """The text again and again."""

    def write(n_bytes: int) -> str:
        left = n_bytes - len(before) - len(after)
        times = max(1, left // len((text + between).encode()))
        return before + between.join([text] * times) + after

    return write


def quoted(inner: Shape) -> Shape:
    """A JSON text within a string."""

    def write(n_bytes: int) -> str:
        whole = json.dumps(inner(n_bytes))
        if len(whole) > n_bytes:
            whole = json.dumps(inner(n_bytes * n_bytes // len(whole)))
        return whole

    return write


def members(value: str) -> Shape:
    """An object of many members with that value."""

    def write(n_bytes: int) -> str:
        times = max(1, n_bytes // (len(value) + 11))
        return "{" + ",".join(f'"{at:07d}":{value}' for at in range(times)) + "}"

    return write


def nested(opening: str, closing: str) -> Shape:
    """As deep as may be, again and again."""
    return repeated(opening * DEEP + "0" + closing * DEEP, "[", "]", ",")


def references(n_bytes: int) -> str:
    """Properties that refer to one another, the last by a path of many steps."""
    steps = min(STEPS, n_bytes // 4)
    times = max(1, (n_bytes - 2 * steps) // 64)
    properties: dict[str, Any] = {
        str(at): {"$ref": f"#/$defs/{at + 1}"} for at in range(min(times, 30_000))
    }
    path = {"$ref": "#" + "/a" * steps}
    last = {"$defs": {**properties, str(len(properties)): path}, "properties": properties}
    return json.dumps({"type": "object", **last, "required": ["0"]})


def one_member(inner: Shape) -> Shape:
    """An object whose one member is of that shape: the schema of an enum, say."""
    return lambda n_bytes: f'{{"enum":{inner(n_bytes - 9)}}}'


EMPTY_LISTS = repeated("[]", "[", "]", ",")
NUMBERS = repeated("1", "[", "]", ",")
FLOATS = repeated("1.0", "[", "]", ",")
LONG_NUMBERS = repeated("9" * 500, "[", "]", ",")
DEEP_LISTS, DEEP_OBJECTS = nested("[", "]"), nested('{"a":', "}")

TEXTS: dict[str, Shape] = {
    "plain": repeated("word ", '"', '"'),
    "one letter": repeated("a", '"', '"'),
    "spaces": repeated(" ", '"', '"'),
    "control tokens": repeated("<|im_start|>", '"', '"'),
    "quotes": repeated('\\"', '"', '"'),
    "backslashes": repeated("\\\\", '"', '"'),
    "escapes": repeated("\\u0000", '"', '"'),
    "other scripts": repeated("\u0ba8\u0bbf\U0001f468\u200d\U0001f469e\u0301", '"', '"'),
    "slashes": repeated("/~1", '"#', '"'),
    "repetitions": repeated("(a{1,50}|", '"', '"'),
    "JSON of lists": quoted(one_member(EMPTY_LISTS)),
    "JSON of members": quoted(members("0")),
    "JSON of numbers": quoted(one_member(LONG_NUMBERS)),
    "deep JSON": quoted(repeated("[")),
    "JSON of $ref": quoted(references),
}
LISTS: dict[str, Shape] = {
    "empty lists": EMPTY_LISTS,
    "empty objects": repeated("{}", "[", "]", ","),
    "empty texts": repeated('""', "[", "]", ","),
    "texts": repeated(json.dumps("word " * 200), "[", "]", ","),
    "numbers": NUMBERS,
    "floats": FLOATS,
    "long numbers": LONG_NUMBERS,
    "lists of numbers": repeated("[1,2,3]", "[", "]", ","),
    "deep lists": DEEP_LISTS,
    "deep objects": DEEP_OBJECTS,
}
OBJECTS: dict[str, Shape] = {
    "members": members("0"),
    "members that are empty": members("{}"),
    "enum of lists": one_member(EMPTY_LISTS),
    "enum of numbers": one_member(NUMBERS),
    "enum of long numbers": one_member(LONG_NUMBERS),
    "deep lists": one_member(DEEP_LISTS),
    "deep objects": one_member(DEEP_OBJECTS),
    "$ref": references,
}
SHORT_TEXTS = {name: TEXTS[name] for name in ("one letter", "escapes", "JSON of members")}
OF_KIND = {"string": TEXTS, "array": LISTS, "object": OBJECTS}


def shapes(field: Field) -> dict[str, Shape]:
    """The shapes that the field may have, by name. Some are refused, as late as may be."""
    of_kind = OF_KIND | ({"string": SHORT_TEXTS} if field.is_short else {})
    found = {
        f"{kind}: {name}": shape
        for kind, named in of_kind.items()
        if kind in field.kinds
        for name, shape in named.items()
    }
    if "array" in field.kinds and field.item is not None:
        item = json.dumps(field.item)
        found["array: valid items"] = repeated(item, "[", "]", ",")
        found["array: valid items but the last"] = repeated(item, "[", ",[[]]]", ",")
    return found


MARK = "<value>"


def body(field: Field, shape: Shape, n_bytes: int, *, ends_wrong: bool = False) -> bytes:
    """A body of about that size; one that `ends_wrong` has a last member of the wrong type."""
    frame = field.body(MARK)
    if ends_wrong:
        frame = {key: value for key, value in frame.items() if key != "model"} | {"model": []}
    before, _, after = json.dumps(frame).partition(json.dumps(MARK))
    value = shape(max(8, n_bytes - len(before) - len(after)))
    return (before + value + after).encode("utf-8", "surrogatepass")
