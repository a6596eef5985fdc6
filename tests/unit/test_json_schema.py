"""Schemas as the engine reads them: never wider than JSON Schema says."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import InvalidRequest
from engine.grammar.json_schema import faithful
from engine.values.request import Grammar, GrammarKind
from tests.grammars import LocalGrammars, demo_tokenizer

Accepts = Callable[[object, str], bool]


@pytest.fixture(scope="module")
def accepts() -> Accepts:
    """Whether a text may be generated under a schema."""
    tokenizer = demo_tokenizer(2)
    grammars = LocalGrammars(tokenizer, frozenset())

    def accepts(schema: object, text: str) -> bool:
        matcher = grammars.matcher(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
        tokens = tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return accepts


TIMES = {"type": "string", "format": "date-time"}
A_TEXT = {"$defs": {"a": {"type": "string"}}}
A_NUMBER = {"$defs": {"a": {"type": "number"}}}


@pytest.mark.parametrize(
    ("schema", "forbidden", "allowed"),
    [
        # llguidance's own settings are not a client's
        ({"x-guidance": {"item_separator": ";"}, "type": "array"}, "[1;1]", "[1,1]"),
        # a name may not be spelled another way to escape its schema
        ({"properties": {"a": {"type": "null"}}, "type": "object"}, '{"\\u0061":1}', '{"a":null}'),
        ({"prefixItems": [{"type": "null"}], "additionalItems": False}, "[1]", "[null]"),
        ({"items": [{"type": "null"}], "additionalItems": False}, "[null,1]", "[null]"),
        ({"type": "string", "format": "date"}, '"1999-02-29"', '"2000-02-29"'),
        ({"type": "string", "format": "date"}, '"1900-02-29"', '"1996-02-29"'),
        ({"type": "string", "format": "date"}, '"0000-01-01"', '"0001-01-31"'),
        ({"type": "string", "format": "time"}, '"12:00:60Z"', '"12:00:59.5+01:00"'),
        (TIMES, '"2023-02-29T00:00:00Z"', '"2024-02-29T00:00:00Z"'),
        (
            TIMES | {"allOf": [{"maxLength": 20}]},
            '"2024-02-29T00:00:00.0Z"',
            '"2024-02-29T00:00:00Z"',
        ),
        ({"type": "string", "format": "hostname"}, '"xn--X"', '"a--b.x-y.example"'),
        ({"type": "string", "pattern": '^[^"]$'}, '"\\""', '"a"'),
        ({"type": "string", "pattern": r"^[\x00-\x1f]$"}, '"\\\\"', '"\\n"'),
        ({"type": "string", "pattern": "^[a[b]$"}, '"c"', '"["'),
        ({"type": "string", "pattern": "^[a&&b]$"}, '"c"', '"&"'),
        ({"type": "string", "pattern": "^.$"}, '"\\r"', '"é"'),
        ({"type": "string", "pattern": r"^\S$"}, '"\ufeff"', '"x"'),
        (
            {"type": "object", "patternProperties": {r"^\d$": {"type": "null"}}},
            '{"1":1}',
            '{"1":null}',
        ),
        ({"type": "integer", "maximum": 2**63 - 1}, str(2**63), str(2**62)),
        (
            {"$ref": "#/components/A", "components": {"A": {"format": "date"}}},
            '"1999-02-29"',
            '"1999-02-28"',
        ),
        (True, "[", "[1]"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$id": "x y", "type": "null"}}}, "1", "null"),
        (
            {"items": {"$id": "Box<T>", "$ref": "#/$defs/a"}, "type": "array", **A_NUMBER},
            '["a"]',
            "[1]",
        ),
        ({"items": {"$id": "b", "$ref": "#/$defs/a", **A_TEXT}, "type": "array"}, "[1]", '["a"]'),
        ({"$ref": "#a", "$defs": {"b": {"$anchor": "a", "type": "null"}}}, "1", "null"),
        ({"$ref": "#a", "$defs": {"b": {"$dynamicAnchor": "a", "type": "null"}}}, "1", "null"),
        ({"$ref": "#a", "definitions": {"b": {"$id": "#a", "type": "null"}}}, "1", "null"),
        (
            {"$dynamicAnchor": "n", "type": "array", "items": {"$ref": "#n"}, "maxItems": 1},
            "[[1]]",
            "[[]]",
        ),
    ],
)
def test_what_a_schema_forbids_is_never_generated(
    accepts: Accepts, schema: object, forbidden: str, allowed: str
) -> None:
    assert accepts(schema, allowed)
    assert not accepts(schema, forbidden)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (False, "false allows nothing"),
        ([], "a schema is an object"),
        ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": [{}], "prefixItems": [{}]}, "prefixItems"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"const": [2**53 + 1]}, "not a 64-bit float"),
        ({"const": 2**61 - 1}, "not a 64-bit float"),  # a prime
        ({"enum": [[{"a": 10**400}]]}, "beyond 64-bit"),
        ({"const": "a\0b"}, "control characters"),
        ({"properties": {"\1": {}}, "patternProperties": {"^.$": False}}, "control characters"),
        ({"$ref": "http://example.com/a"}, "must begin with #"),
        ({"$ref": "#/$defs/a"}, "leads nowhere"),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a~1b": {}}}, "leads nowhere"),
        (
            {"anyOf": [{"$id": "http://a.com/b", "$ref": "#/$defs/a", **A_TEXT}], **A_NUMBER},
            "two meanings, by an \\$id",
        ),
        (
            {"anyOf": [{"$id": "b", "$ref": "#/$defs/a", **A_TEXT}, {"$ref": "#/$defs/a"}]},
            "two meanings, by an \\$id|leads nowhere",
        ),
        ({"items": {"$id": "Its type", "items": {"$ref": "#"}}}, "two meanings, by an \\$id"),
        ({"$ref": "#a", "$defs": {"b": {"$anchor": "a"}, "c": {"$anchor": "a"}}}, "leads nowhere"),
        ({"$ref": "#a", "$defs": {"b": {"$id": "b", "items": {"$anchor": "a"}}}}, "leads nowhere"),
        ({"$ref": "#"}, "."),
        ({"type": "string", "format": "date", "allOf": 1}, "."),
        ({"type": "string", "pattern": "(?=a)b"}, "look-arounds"),
        ({"type": "string", "pattern": r"(a)\1"}, r"\\1"),
        ({"type": "string", "pattern": r"a\x01b"}, "control characters"),
        ({"type": "string", "pattern": "[a"}, "cut short"),
    ],
)
def test_what_would_be_read_otherwise_is_refused(
    accepts: Accepts, schema: object, why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        accepts(schema, "")


@given(st.text(max_size=12) | st.sampled_from(["http://a.com/b", "urn:x", "a b", "Box<T>", "a#b"]))
def test_the_id_of_an_inner_schema_is_any_text(text: str) -> None:
    """Whatever generators call a type, what its references lead to is as it would be without."""

    def schema(*place: str, **id: str) -> dict[str, object]:
        tree = {"type": "array", "items": {"$ref": "#/$defs/Tree"}}
        found: dict[str, object] = {
            "properties": {"a": {"$ref": "#/$defs/Tree"}, "b": {"items": {"$ref": "#/$defs/b~1c"}}},
            "$defs": {"Tree": tree, "b/c": {"const": 1}},
        }
        inner: Any = found
        for step in place:
            inner = inner[step]
        inner.update(id)
        return found

    expected = faithful(json.dumps(schema()))
    places = [("properties", "a"), ("properties", "b"), ("properties", "b", "items")]
    places += [("$defs", "Tree"), ("$defs", "Tree", "items"), ("$defs", "b/c")]
    for place in places:
        assert faithful(json.dumps(schema(*place, **{"$id": text}))) == expected


def test_deep_nesting_is_refused_or_read(accepts: Accepts) -> None:
    def nested(levels: int) -> object:
        return {"type": "array", "items": nested(levels - 1)} if levels else {"type": "null"}

    assert accepts(nested(30), "[" * 30 + "null" + "]" * 30)
    with pytest.raises(InvalidRequest):
        accepts(nested(500), "")


CHARACTERS = [*map(chr, range(128)), *"\x80éß\u2028日😀"]


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"^[^\x00-\x1f]$", r"^[^\"]$", r"^[^\\]$", r"^[\x00-\x7f]$", r"^[\w.-]$", r"^[\]\-a]$"),
        *(r"^(?:a|[\d_])$", r"^[+\--9]$", r"^\/$", r"^\x41$", r"^\u0042|c$", r"^(?:{|})$"),
        *(r"^\W$", r"^[^\W]$", r"^\D$", r"^[\D]$", r"^[^\n]$", r"^[!-~\t]$", "^(é|ß)$", r"^\t$"),
        *(r"^a{0,1}.$", r"[a-c]$", r"^[^é-日]$", r"^[\f\v]$"),
    ],
)
def test_patterns_mean_what_they_mean_elsewhere(accepts: Accepts, pattern: str) -> None:
    """Judged by Python's re, which agrees with ECMA-262 on these."""
    means = re.compile(pattern.replace("$", r"\Z"), re.ASCII)
    schema = {"type": "string", "pattern": pattern}
    generated = {c for c in CHARACTERS if accepts(schema, json.dumps(c, ensure_ascii=False))}
    meant = {c for c in CHARACTERS if means.search(c)}
    assert generated <= meant
    assert meant - generated <= {*map(chr, range(32)), "\x7f", "\u2028"}


def test_an_error_quotes_the_beginning_of_a_long_reference() -> None:
    with pytest.raises(ValueError, match="leads nowhere") as error:
        faithful(json.dumps({"$ref": "#/" + "a/" * 16_000 + "a"}))
    assert len(str(error.value)) < 200
