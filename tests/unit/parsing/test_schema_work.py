"""Schemas whose references and alternatives would take too much work are refused."""

from operator import attrgetter
from typing import Any

import pytest

from server.parsing.answer import ToolFormat
from server.parsing.formats.xml_calls import GLM45
from server.parsing.lark import (
    MAX_WRITTEN_CHARACTERS,
    Function,
    Lark,
    NotASchema,
    calls_grammar,
)
from server.parsing.registry import TOOL_FORMATS
from server.parsing.schemas import (
    MAX_FOLLOWED_STEPS,
    MAX_REFERENCE_STEPS,
    check_work,
    closed,
    kinds,
)

Schema = dict[str, Any]


class CountedReads(dict[str, Any]):
    """A root schema that counts how often a reference is looked up in it."""

    n_reads = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.n_reads += 1
        return super().get(key, default)


class CountedName(str):
    """A name that counts how often any of them is compared with another."""

    n_comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedName.n_comparisons += 1
        return str.__eq__(self, other)


def path(n_steps: int) -> str:
    return "#" + "/a" * n_steps


def nested(n_steps: int) -> Schema:
    """A schema in which `path(n_steps)` leads to a string."""
    schema: Schema = {"type": "string"}
    for _ in range(n_steps):
        schema = {"a": schema}
    return schema


def chain(n_references: int, last: Schema) -> Schema:
    """Definitions of which each but the last refers to the next."""
    linked = {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(n_references)}
    return linked | {str(n_references): last}


def test_the_steps_of_one_reference_are_bounded() -> None:
    def schema(n_steps: int) -> Schema:
        return {"properties": {"p": {"items": [{"$ref": path(n_steps)}]}}, **nested(n_steps)}

    check_work([schema(MAX_REFERENCE_STEPS)])
    with pytest.raises(ValueError, match=f"more than {MAX_REFERENCE_STEPS} steps: #/a"):
        check_work([schema(MAX_REFERENCE_STEPS + 1)])


def test_the_steps_of_all_parameters_are_bounded_together() -> None:
    def schema(n_parameters: int) -> Schema:
        shared = {"anyOf": [{"$ref": path(n)} for n in range(MAX_REFERENCE_STEPS)]}
        parameters = {f"p{n}": {"$ref": "#/$defs/shared"} for n in range(n_parameters)}
        return {"properties": parameters, "$defs": {"shared": shared}}

    each = MAX_REFERENCE_STEPS**2 // 2
    few, many = MAX_FOLLOWED_STEPS // each // 3, 2 * MAX_FOLLOWED_STEPS // each
    check_work([schema(few)])
    check_work([schema(few)] * 2)
    for functions in ([schema(many)], [schema(few)] * 4):
        with pytest.raises(ValueError, match=f"more than {MAX_FOLLOWED_STEPS} steps"):
            check_work(functions)


def test_undeclared_parameters_count() -> None:
    alternatives = {"anyOf": [{"const": n} for n in range(MAX_FOLLOWED_STEPS)]}
    with pytest.raises(ValueError, match="steps"):
        check_work([{"additionalProperties": alternatives}])


def test_what_tools_usually_have_is_far_below_the_limit() -> None:
    """The schema of 1,000 functions with 25 parameters each."""
    choice = {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}
    parameters = {f"p{n}": choice if n % 5 == 0 else {"type": "string"} for n in range(25)}
    check_work([{"properties": parameters, "$defs": {"a": {"type": "object"}}}] * 1000)


def test_a_chain_of_references_is_followed_to_its_end() -> None:
    root = {"$defs": chain(100, {"type": "integer"})}
    assert kinds({"$ref": "#/$defs/0"}, root) == {"integer"}


@pytest.mark.parametrize("circle", [{"$ref": "#/$defs/a"}, {"anyOf": [{"$ref": "#/$defs/a"}]}])
def test_a_circle_of_references_allows_any_type(circle: Schema) -> None:
    root = {"properties": {"p": circle}, "$defs": {"a": circle}}
    assert kinds(circle, root) == set()
    any_type: Schema = {"properties": {"p": {}}}
    grammars = [
        calls_grammar(GLM45.syntax, [Function("f", schema)], {}, many=False)
        for schema in (root, any_type)
    ]
    assert grammars[0] == grammars[1]


@pytest.mark.parametrize("n_links", [10, 40])
def test_closing_a_schema_looks_each_reference_up_a_few_times(n_links: int) -> None:
    definitions = chain(n_links, {"type": "object", "properties": {}})
    members = {f"p{n}": {"$ref": "#/$defs/0"} for n in range(100)}
    root = CountedReads({"$defs": definitions, "properties": members})
    closed(root)
    assert 100 <= root.n_reads < 2 * (100 + n_links) + 100


def test_each_reference_of_a_json_grammar_is_looked_up_once() -> None:
    root = CountedReads({"$defs": chain(10, {"type": "string"})})
    root["properties"] = {f"p{n}": {"$ref": "#/$defs/0"} for n in range(100)}
    Lark({}).json(root, strict=False)
    assert root.n_reads == 100 + 10


@pytest.mark.parametrize("format", TOOL_FORMATS.values(), ids=attrgetter("name"))
def test_required_names_are_compared_a_few_times_each(
    format: ToolFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CountedName, "n_comparisons", 0)
    names = [f"p{n}" for n in range(500)]
    schema = {
        "properties": {name: {"type": "string"} for name in names},
        "required": [CountedName(name) for name in names],
    }
    calls_grammar(format.syntax, [Function("f", schema)], {}, many=False)
    assert CountedName.n_comparisons <= 8 * len(names)


def test_definitions_are_not_repeated_without_end() -> None:
    """For each parameter the grammar has all definitions."""
    definitions = {"a": {"type": "object", "description": "x" * (MAX_WRITTEN_CHARACTERS // 64)}}
    members = {f"p{n}": {"items": {"$ref": "#/$defs/a"}} for n in range(100)}
    function = Function("f", {"properties": members, "$defs": definitions})
    with pytest.raises(NotASchema, match=f"more than {MAX_WRITTEN_CHARACTERS} characters"):
        calls_grammar(GLM45.syntax, [function], {}, many=False)
