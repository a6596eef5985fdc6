"""The grammar of each family allows what its maker's template writes of a call, and that is read.

Granite's puts the arguments before the name, as keys are sorted; its models do not.
"""

import json
from typing import Any

import pytest

from server.parsing.lark import Function, calls_grammar
from tests.property.test_parsing import FAMILIES
from tests.unit.parsing.answers import parsed
from tests.unit.parsing.walks import MARKERS, allows

TEXT = {"type": "string"}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": TEXT,
        "note": {"anyOf": [TEXT, {"type": "null"}]},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "sure": {"type": "boolean"},
        "mode": {"enum": [True, None, 1]},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "place": {"type": "object"},
        "tags": {"type": "array", "items": TEXT},
    },
}
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"text": "Zürich 日本 🙂", "count": -12, "ratio": 2.5},
    {"text": "  if a:\n\t\tb = ['x', \"y\"]\n", "count": 0},
    {"note": None, "sure": True, "mode": None, "maybe": None},
    {"note": "so", "sure": False, "mode": True, "maybe": 3},
    {"place": {"a": {"b": [1, "two", None, True]}, "é": "ü"}, "tags": ["it's", "a, b"]},
    {"place": {}, "tags": []},
]


class Json(dict[str, Any]):
    """An object that Python prints as JSON."""

    def __repr__(self) -> str:
        return json.dumps(self, ensure_ascii=False)


def objects_as_json(given: dict[str, Any]) -> dict[str, Any]:
    return {key: Json(value) if isinstance(value, dict) else value for key, value in given.items()}


def written(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The calls as the template of the family's maker puts them next to one another."""
    if name in ("glm47", "laguna"):
        return "".join(FAMILIES[name].write([call]) for call in calls)
    if name in ("lfm2", "pythonic"):
        return FAMILIES[name].write([(called, objects_as_json(given)) for called, given in calls])
    if name in ("gemma4", "functiongemma"):
        calls = [(called, dict(sorted(given.items()))) for called, given in calls]
        return FAMILIES[name].write(calls).replace("null", "None")
    return FAMILIES[name].write(calls).removeprefix("<|start|>assistant")


def without_nulls(value: Any) -> Any:
    """As MiniMax M3's template writes a value: without members that are null, and an item that is
    null as one without text.
    """
    match value:
        case dict():
            return {key: without_nulls(of) for key, of in value.items() if of is not None}
        case list():
            return ["" if of is None else without_nulls(of) for of in value]
    return value


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "granite"])
def test_the_grammar_allows_what_the_template_writes_and_it_is_read(name: str) -> None:
    family = FAMILIES[name]
    functions = [Function("f", PARAMETERS), Function("g_2", {"properties": {}})]
    grammar = calls_grammar(family.tools.syntax, functions, MARKERS, many=True)
    schemas = {function.name: dict(function.parameters) for function in functions}
    for calls in [*([("f", given)] for given in ARGUMENTS), [("f", {"count": 1}), ("g_2", {})]]:
        text = written(name, calls)
        assert allows(grammar, text), text
        found = parsed(family.format, [text], schemas).calls
        is_m3 = name == "minimax_m3"
        assert found == [(one, without_nulls(given) if is_m3 else given) for one, given in calls]
