"""What is sent all at once: bodies that have kept others waiting, and bodies made for a field."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.hostile.cases import CHAT, COMPLETIONS, MESSAGES
from tests.hostile.fields import Field
from tests.hostile.shapes import body, shapes

SIZES = (1 << 10, 8 << 10, 31 << 10, 256 << 10, 1 << 20)
"""Bytes of a body that every field is sent with every shape. One of each is sent at once."""

MOST_BYTES = (8 << 20) - 1024
"""About the most that the daemon takes. Reading so much takes seconds, so that not every field is
sent it: see `largest`."""

LARGEST = (MOST_BYTES,) * 6


@dataclass(frozen=True, slots=True)
class FieldAttack:
    """Bodies with a costly value in one field, of several sizes. Every other one is refused for its
    last member, after all else has been validated.
    """

    field: Field
    shape: str
    sizes: tuple[int, ...] = SIZES
    number: int = 1  # of those with the same name: a field may be reached in several ways

    @property
    def name(self) -> str:
        n_largest = self.sizes.count(MOST_BYTES)
        more = f", {n_largest} of 8 MB" if n_largest else ""
        more += f" ({self.number})" if self.number > 1 else ""
        return f"{self.method} {self.route} {self.field.name}, {self.shape}{more}"

    @property
    def method(self) -> str:
        return self.field.method

    @property
    def route(self) -> str:
        return self.field.route

    def bodies(self) -> Sequence[bytes]:
        shape = shapes(self.field)[self.shape]
        return [
            body(self.field, shape, size, ends_wrong=at % 2 == 1)
            for at, size in enumerate(self.sizes)
        ]


@dataclass(frozen=True, slots=True)
class JointAttack:
    """Several attacks on fields of one route at once."""

    attacks: tuple[FieldAttack, ...]

    @property
    def name(self) -> str:
        return f"{self.attacks[0].name} and {len(self.attacks) - 1} more"

    @property
    def method(self) -> str:
        return self.attacks[0].method

    @property
    def route(self) -> str:
        return self.attacks[0].route

    def bodies(self) -> Sequence[bytes]:
        return [one for attack in self.attacks for one in attack.bodies()]


def field_attacks(found: Iterable[Field]) -> list[FieldAttack]:
    """Every field with every shape that it may have."""
    attacks, n_named = list[FieldAttack](), Counter[str]()
    for one in (FieldAttack(field, shape) for field in found for shape in shapes(field)):
        n_named[one.name] += 1
        attacks.append(replace(one, number=n_named[one.name]))
    return attacks


def largest(attacks: Iterable[FieldAttack]) -> list[FieldAttack]:
    """Of each kind of field and shape one attack, with bodies of the largest size, one of which is
    refused for its last member. Fields are of one kind, on whatever routes, if they have the same
    name, types and items. Of texts that may only be short the name does not matter.
    """
    kinds = dict[tuple[object, ...], FieldAttack]()
    for attack in attacks:
        at = attack.field
        name = "" if at.is_short else at.name.rpartition(".")[2]
        kind = (name, at.kinds, json.dumps(at.item), at.is_short, attack.shape)
        kinds.setdefault(kind, replace(attack, sizes=(MOST_BYTES, MOST_BYTES)))
    return list(kinds.values())


@dataclass(frozen=True, slots=True)
class NamedAttack:
    """The same body several times. `write` is a function of a module, so that it can be sent."""

    name: str
    route: str
    times: int
    write: Callable[[], dict[str, Any]]
    method: str = "POST"

    def bodies(self) -> Sequence[bytes]:
        return [json.dumps(self.write(), separators=(",", ":")).encode()] * self.times


Attack = FieldAttack | JointAttack | NamedAttack
"""Is sent to a process, which makes its bodies."""

TALK = {"messages": MESSAGES, "max_tokens": 4}
MILLIONS = 2_600_000
"""Empty lists in 8 MB."""


def long_path() -> dict[str, Any]:
    path = {"$ref": "#" + "/a" * 12_000}
    properties = {f"p{at}": path if at == 0 else {"$ref": "#/x"} for at in range(800)}
    schema = {"type": "object", "properties": properties, "x": path}
    function = {"name": "f", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    return {**TALK, "tools": tools, "tool_choice": "required"}


def refused_at_its_end() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": ""}] * 1000, "temperature": 9}


def refused_input() -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "a"}] * 900, "tool_choice": 9}


def refused_count() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}] * 1000, "tools": 3}


def custom_tools() -> dict[str, Any]:
    tools = [{"type": "custom", "custom": {"name": "a"}}] * 600
    return {"messages": MESSAGES, "tools": tools, "temperature": 9}


def guided_json() -> dict[str, Any]:
    return {**TALK, "guided_json": '{"enum":[' + "[]," * MILLIONS + "[]]}"}


def call_arguments() -> dict[str, Any]:
    function = {"name": "f", "arguments": '{"a":[' + "[]," * MILLIONS + "[]]}"}
    call = {"id": "a", "type": "function", "function": function}
    turns = [{"role": "assistant", "tool_calls": [call]}]
    return {**TALK, "messages": [*MESSAGES, *turns, {"role": "tool", "tool_call_id": "a"}]}


def scored_prompts() -> dict[str, Any]:
    """30,000 tokens, each with its log-probability and the five best."""
    prompts = [[300 + (at + 7 * token) % 700 for token in range(3750)] for at in range(8)]
    return {"prompt": prompts, "echo": True, "logprobs": 5, "max_tokens": 1}


def embedded_texts() -> dict[str, Any]:
    texts = [f"{at} {'hello world ' * 85}" for at in range(2048)]
    return {"model": "embedder", "input": texts}


def ranked_documents() -> dict[str, Any]:
    documents = [f"{at} {'hello world ' * 3}" for at in range(2000)]
    return {"model": "reranker", "query": "What?", "documents": documents}


def decided_questions() -> dict[str, Any]:
    """With 20,000 choices, each of them another text."""
    questions = [
        {
            "type": "choice",
            "instructions": "Which?",
            "choices": [{"value": f"{at} and {choice}"} for choice in range(250)],
        }
        for at in range(80)
    ]
    return {"input": "hello world " * 20, "questions": questions}


def many_choices() -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    choices = {"n": 64, "logprobs": True, "top_logprobs": 20, "temperature": 1}
    return {"messages": MESSAGES, "max_tokens": 60, "response_format": format, **choices}


def named_attacks() -> Iterator[NamedAttack]:
    """Attacks that have made others wait for more than a second."""
    input_tokens, count_tokens = "/v1/responses/input_tokens", "/v1/messages/count_tokens"
    yield NamedAttack("a $ref of 12,000 steps, 800 references", CHAT, 2, long_path)
    yield NamedAttack("1,000 messages, 30 times", CHAT, 30, refused_at_its_end)
    yield NamedAttack("1,000 messages, 100 times", CHAT, 100, refused_at_its_end)
    yield NamedAttack("900 items to be counted, 30 times", input_tokens, 30, refused_input)
    yield NamedAttack("1,000 messages to be counted, 30 times", count_tokens, 30, refused_count)
    yield NamedAttack("600 custom tools, 30 times", CHAT, 30, custom_tools)
    yield NamedAttack("guided_json as text of 2.6 million lists", CHAT, 6, guided_json)
    yield NamedAttack("arguments of 2.6 million lists", CHAT, 6, call_arguments)
    yield NamedAttack("30,000 tokens with log-probabilities", COMPLETIONS, 1, scored_prompts)
    yield NamedAttack("2,048 texts of 1 KB to be embedded", "/v1/embeddings", 1, embedded_texts)
    yield NamedAttack("2,000 documents to be ranked", "/v1/rerank", 1, ranked_documents)
    yield NamedAttack("80 questions with 250 choices", "/v1/decisions", 1, decided_questions)
    yield NamedAttack("64 answers with 20 log-probabilities", CHAT, 3, many_choices)
