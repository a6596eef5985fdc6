"""Grammars of calls where an agent has many tools, and pages of words about them."""

from collections.abc import Mapping
from typing import Any

import pytest

from engine.values.request import MAX_GRAMMAR_CHARACTERS, GrammarKind
from server.parsing.lark import Function, calls_grammar
from server.parsing.registry import TOOL_FORMATS
from tests.unit.parsing.walks import text_of, walk

ABOUT = "What it is for, when it is to be left out, and what becomes of it then. " * 4


def described(kind: str) -> Mapping[str, Any]:
    return {"type": kind, "title": "Title", "description": ABOUT, "$comment": ABOUT}


def tool(index: int) -> Function:
    named = {f"{name}_{index}": described("string") for name in ("owner", "place", "body")}
    properties = {**named, "title": described("string"), "description": described("integer")}
    parameters = {"type": "object", "properties": properties, "required": ["description"]}
    return Function(f"do_{index}", {**parameters, "description": ABOUT}, strict=True)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_many_tools_with_long_descriptions_make_a_grammar_that_is_not_too_long(name: str) -> None:
    tools = [tool(index) for index in range(48)]
    grammar = calls_grammar(TOOL_FORMATS[name].syntax, tools, {}, many=True)
    assert len(grammar) <= MAX_GRAMMAR_CHARACTERS[GrammarKind.LARK]


@pytest.mark.parametrize("strict", [False, True])
def test_parameters_that_are_called_as_what_describes_them_stay(strict: bool) -> None:
    constants = {"title": {"const": "Köln"}, "description": {"const": {"title": "x"}}}
    parameters = {"properties": constants, "required": ["title", "description"]}
    function = Function("f", parameters, strict)
    grammar = calls_grammar(TOOL_FORMATS["mistral_args"].syntax, [function], {}, many=False)
    tokens = walk(grammar, 0, [])
    assert tokens is not None
    arguments = '{"title": "Köln", "description": {"title": "x"}}'
    assert text_of(tokens) == f"[TOOL_CALLS]f[ARGS]{arguments}"
