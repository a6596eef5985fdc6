"""What a client may send to harm others: requests that are answered with 200 or 400."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Say something."}]

Body: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    path: str
    body: Body


def chat(name: str, **fields: Any) -> Case:
    return Case(name, CHAT, {"messages": MESSAGES, "max_tokens": 16, **fields})


def completion(name: str, **fields: Any) -> Case:
    return Case(name, COMPLETIONS, {"prompt": "a", "max_tokens": 16, **fields})


def in_all_dialects(name: str, schema: Body) -> list[Case]:
    """A schema wherever one can be sent."""
    parameters = schema if schema.get("type") == "object" else {"type": "object", **schema}
    function = {"name": "f", "parameters": parameters, "strict": True}
    named = {"name": "x", "schema": schema, "strict": True}
    tool = {"name": "f", "input_schema": parameters, "strict": True}
    told = {"messages": MESSAGES, "max_tokens": 16}
    return [
        chat(f"{name}, chat", response_format={"type": "json_schema", "json_schema": named}),
        chat(
            f"{name}, chat's tools",
            tools=[{"type": "function", "function": function}],
            tool_choice="required",
        ),
        Case(
            f"{name}, responses",
            "/v1/responses",
            {
                "input": "Hi",
                "max_output_tokens": 16,
                "text": {"format": {"type": "json_schema", **named}},
            },
        ),
        Case(
            f"{name}, messages",
            "/v1/messages",
            {**told, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
        ),
        Case(
            f"{name}, messages' tools",
            "/v1/messages",
            {**told, "tools": [tool], "tool_choice": {"type": "any"}},
        ),
        Case(
            f"{name}, Ollama",
            "/api/chat",
            {"messages": MESSAGES, "options": {"num_predict": 16}, "format": schema},
        ),
    ]


THROUGH: dict[str, tuple[int, Callable[[Body], Body]]] = {
    "properties": (900, lambda next_one: {"properties": {"a": next_one}}),
    "anyOf": (1300, lambda next_one: {"anyOf": [next_one]}),
    "items": (1300, lambda next_one: {"items": next_one}),
    "additionalProperties": (1300, lambda next_one: {"additionalProperties": next_one}),
    "allOf": (1700, lambda next_one: {"allOf": [next_one]}),
    "nothing": (3000, lambda next_one: next_one),
}


def chain(through: str) -> Body:
    """References one behind the other, which ended the daemon."""
    length, link = THROUGH[through]
    links = {str(at): link({"$ref": f"#/a/{at + 1}"}) for at in range(length)}
    return {"a": {**links, str(length): {"type": "integer"}}, "$ref": "#/a/0"}


def chains() -> Iterator[Case]:
    for through in THROUGH:
        yield from in_all_dialects(f"a chain of $ref through {through}", chain(through))


MULTIPLE = {"type": "integer", "multipleOf": 99999989}
ENDLESS = {
    "ever more classes": r"[\w\s]*[^\d]?" * 2000,
    "ever more letters": r"\p{L}*\p{N}?" * 2000,
    "six levels of repetition": "((((((a{1,50}){1,50}){1,50}){1,50}){1,50}){1,50})",
    "eight levels of repetition": "(" * 8 + "a" + "{1,50})" * 8,
}


def _properties(n: int) -> Body:
    return {"type": "object", "properties": {f"p{at}": {"type": "integer"} for at in range(n)}}


def _tools(n: int) -> list[Body]:
    word = {"type": "string", "pattern": "^(a|b)*a(a|b){41}$"}
    schema = {"type": "object", "properties": {"w": word}, "required": ["w"]}
    functions = [{"name": f"f{at}", "parameters": schema, "strict": True} for at in range(n)]
    return [{"type": "function", "function": one} for one in functions]


def empty(times: int) -> str:
    """Whatever may be nothing may be so in every way at once."""
    rules = (f"start: a{{1,{times}}}", f"a: b{{1,{times}}}", f"b: c{{1,{times}}}", 'c: "x"?')
    return "\n".join(rules)


def dear_later(times: int, prefix: int = 60) -> str:
    """It is cheap in its trial, and behind the prefix each x takes longer than the one before."""
    return f'start: /p{{{prefix}}}/ a{{1,{times}}} "z"\na: b{{1,{times}}}\nb: "x"?\n'


def named() -> Iterator[Case]:
    """All but the chains."""
    yield from in_all_dialects("a multiple", {"type": "object", "properties": {"n": MULTIPLE}})
    for name, pattern in ENDLESS.items():
        yield completion(name, guided_regex=pattern)
        yield from in_all_dialects(
            f"{name}, as a pattern",
            {"type": "object", "properties": {"s": {"type": "string", "pattern": f"^{pattern}$"}}},
        )
    yield from in_all_dialects("5,000 properties", _properties(5000))
    yield chat("60 strict tools", tools=_tools(60), tool_choice="required")
    for times in (10, 60, 1000):
        yield completion(f"{times} times nothing", guided_grammar=empty(times))
    yield completion("half a character", guided_regex="\ud800")
    deep = {"const": json.loads("[" * 400 + "]" * 400)}
    yield from in_all_dialects("deep", {"type": "object", "properties": {"d": deep}})
