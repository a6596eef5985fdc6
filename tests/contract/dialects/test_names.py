"""A field that another server or API has works in every dialect, or is refused by its name: none is
ignored.
"""

from itertools import combinations
from typing import Any

import httpx
import pytest

from engine.values.request import Dry, GrammarKind, SamplingParams, Xtc
from server.generation.foreign_fields import ForeignFields, ForeignSamplers
from tests.contract.dialects.test_roles import BODIES
from tests.contract.fake_engine import END_OF_TEXT
from tests.contract.scripted import Daemon

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GBNF = 'root ::= "a" | other-one\nother-one ::= [0-9]+'
HI = [("user", "Hi")]
CHATS = list(BODIES)
PATHS = [*CHATS, "/v1/completions"]


def post(daemon: Daemon, path: str, fields: dict[str, Any]) -> httpx.Response:
    """A request without tools, and with these fields."""
    body = {"prompt": "Hi"}
    if path in BODIES:
        body = {name: value for name, value in BODIES[path](HI).items() if name != "tools"}
    return daemon.http.post(path, json={"model": "bytes", **body, **fields})


def message_of(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


STRUCTURES: list[tuple[dict[str, Any], GrammarKind]] = [
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, GrammarKind.JSON_SCHEMA),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, GrammarKind.JSON_SCHEMA),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        GrammarKind.JSON_SCHEMA,
    ),
    ({"json_schema": SCHEMA}, GrammarKind.JSON_SCHEMA),
    ({"json_schema": '{"type": "object"}'}, GrammarKind.JSON_SCHEMA),
    ({"format": SCHEMA}, GrammarKind.JSON_SCHEMA),
    ({"format": "json"}, GrammarKind.JSON_SCHEMA),
    ({"grammar": GBNF}, GrammarKind.GBNF),
    ({"guided_grammar": GBNF}, GrammarKind.GBNF),
    ({"structured_outputs": {"grammar": GBNF}}, GrammarKind.GBNF),
    ({"grammar": 'start: "::="'}, GrammarKind.LARK),
    ({"ebnf": GBNF}, GrammarKind.GBNF),
    ({"regex": "a+"}, GrammarKind.REGEX),
    ({"guided_regex": "a+"}, GrammarKind.REGEX),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("fields", "kind"), STRUCTURES, ids=repr)
def test_what_the_answer_has_to_match_is_kept_to(
    hermes: Daemon, path: str, fields: dict[str, Any], kind: GrammarKind
) -> None:
    assert post(hermes, path, fields).status_code == 200
    constraint = hermes.asked.constraint
    assert constraint is not None
    assert constraint.grammar.kind is kind
    asked = next(iter(fields))
    assert constraint.param.startswith(asked)
    if "SCHEMA" in kind.name and SCHEMA in [*fields.values(), *fields[asked]]:
        assert '"a"' in constraint.grammar.text


@pytest.mark.parametrize("path", PATHS)
def test_what_asks_for_no_structure_is_none(hermes: Daemon, path: str) -> None:
    nothing = {"grammar": "", "regex": "", "ebnf": "", "format": "", "json_schema": None}
    assert post(hermes, path, nothing).status_code == 200
    assert hermes.asked.constraint is None


@pytest.mark.parametrize("path", PATHS)
def test_of_two_structures_the_error_names_both(hermes: Daemon, path: str) -> None:
    names = {"regex": "a", "ebnf": GBNF, "json_schema": SCHEMA, "grammar": GBNF, "guided_json": {}}
    for one, other in combinations(names, 2):
        said = message_of(post(hermes, path, {one: names[one], other: names[other]}))
        assert one in said
        assert other in said


SWITCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "enable_thinking": ({"enable_thinking": True}, {"enable_thinking": False}),
    "thinking": ({"thinking": {"type": "enabled"}}, {"thinking": {"type": "disabled"}}),
    "think": ({"think": True}, {"think": False}),
    "reasoning.enabled": ({"reasoning": {"enabled": True}}, {"reasoning": {"enabled": False}}),
    "chat_template_kwargs.enable_thinking": (
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ),
}
"""Fields that switch thinking on, and off."""

EFFORTS: dict[str, dict[str, Any]] = {
    "reasoning_effort": {"reasoning_effort": "low"},
    "reasoning.effort": {"reasoning": {"effort": "low"}},
    "think": {"think": "low"},
}

BUDGETS: dict[str, dict[str, Any]] = {
    "thinking_budget": {"thinking_budget": 5},
    "thinking_token_budget": {"thinking_token_budget": 5},
    "thinking_budget_tokens": {"thinking_budget_tokens": 5},
    "reasoning_budget_tokens": {"reasoning_budget_tokens": 5},
    "thinking.budget_tokens": {"thinking": {"type": "enabled", "budget_tokens": 5}},
    "reasoning.max_tokens": {"reasoning": {"max_tokens": 5}},
}


@pytest.mark.parametrize("path", CHATS)
@pytest.mark.parametrize("name", SWITCHES)
def test_thinking_is_switched_by_any_name(hermes: Daemon, path: str, name: str) -> None:
    for fields, switch in zip(SWITCHES[name], (True, False), strict=True):
        assert post(hermes, path, fields).status_code == 200
        assert hermes.given[1]["enable_thinking"] is switch


@pytest.mark.parametrize("path", CHATS)
@pytest.mark.parametrize("fields", [{"thinking": True}, *EFFORTS.values()], ids=repr)
def test_an_effort_asks_for_thinking(hermes: Daemon, path: str, fields: dict[str, Any]) -> None:
    assert post(hermes, path, fields).status_code == 200
    assert hermes.given[1]["enable_thinking"] is True
    assert hermes.given[1].get("reasoning_effort", "low") == "low"


@pytest.mark.parametrize("path", CHATS)
@pytest.mark.parametrize("kind", ["adaptive", "auto", "between_tools"])
def test_thinking_is_left_to_the_template(hermes: Daemon, path: str, kind: str) -> None:
    assert post(hermes, path, {"thinking": {"type": kind}}).status_code == 200
    assert hermes.given[1] == {}


@pytest.mark.parametrize("path", CHATS)
@pytest.mark.parametrize("name", BUDGETS)
def test_thinking_has_a_budget_by_any_name(hermes: Daemon, path: str, name: str) -> None:
    assert post(hermes, path, BUDGETS[name]).status_code == 200
    budget = hermes.asked.thinking_budget
    assert budget is not None
    assert budget.tokens == 5


@pytest.mark.parametrize("path", CHATS)
def test_a_budget_below_zero_is_none(hermes: Daemon, path: str) -> None:
    assert post(hermes, path, {"thinking_token_budget": -1}).status_code == 200
    assert hermes.asked.thinking_budget is None


def _contradictions() -> list[tuple[str, str, dict[str, Any]]]:
    found = [
        (one, other, SWITCHES[one][0] | SWITCHES[other][1])
        for one, other in combinations(SWITCHES, 2)
    ]
    found += [("reasoning_effort", name, {"reasoning_effort": "none", **on}) for name, (on, _) in
              SWITCHES.items()]  # fmt: skip
    found += [
        (one, other, {**EFFORTS[one], **dict.fromkeys(EFFORTS[other], "high")})
        for one, other in [("reasoning.effort", "reasoning_effort"), ("reasoning_effort", "think")]
    ]
    others = dict.fromkeys(BUDGETS, 6)
    found += [
        ("thinking.budget_tokens", other, {**BUDGETS["thinking.budget_tokens"], other: 6})
        for other in others
        if "." not in other
    ]
    return found


@pytest.mark.parametrize("path", CHATS)
@pytest.mark.parametrize(("one", "other", "fields"), _contradictions())
def test_names_that_contradict_are_named(
    hermes: Daemon, path: str, one: str, other: str, fields: dict[str, Any]
) -> None:
    said = message_of(post(hermes, path, fields))
    assert one in said
    assert other in said


@pytest.mark.parametrize("name", [*SWITCHES, *EFFORTS, *BUDGETS])
def test_a_text_completion_has_no_thinking(hermes: Daemon, name: str) -> None:
    fields = SWITCHES[name][0] if name in SWITCHES else (EFFORTS | BUDGETS)[name]
    said = message_of(post(hermes, "/v1/completions", fields))
    assert said.startswith(next(iter(fields)))


def sampled(daemon: Daemon, path: str, fields: dict[str, Any]) -> SamplingParams:
    """The sampling of a request with these fields, which are options in Ollama's."""
    answer = post(daemon, path, {"options": fields} if path == "/api/chat" else fields)
    assert answer.status_code == 200, answer.text
    return daemon.asked.sampling


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}}], ids=repr
)
def test_a_prompt_that_is_warmed_is_not_answered(
    hermes: Daemon, path: str, stream: bool, fields: dict[str, Any]
) -> None:
    hermes.say("Hello")
    others = {} if path == "/api/chat" else {"min_tokens": 2}
    answer = post(hermes, path, {**fields, **others, "regex": "a+", "stream": stream})
    assert answer.status_code == 200
    assert "Hello" not in answer.text
    asked = hermes.asked
    assert (asked.max_tokens, asked.constraint, asked.sampling.min_tokens) == (0, None, 0)
    assert len(asked.prompt) > 1
    assert "model_context_window_exceeded" not in answer.text


@pytest.mark.parametrize("path", PATHS)
def test_the_repetition_penalty_has_two_names(hermes: Daemon, path: str) -> None:
    assert sampled(hermes, path, {"repeat_penalty": 1.5}).repetition_penalty == 1.5
    if path != "/api/chat":  # which has one of them alone
        both = {"repeat_penalty": 1.5, "repetition_penalty": 1.2}
        said = message_of(post(hermes, path, both))
        assert "repeat_penalty" in said
        assert "repetition_penalty" in said


@pytest.mark.parametrize("path", PATHS)
def test_xtc_spares_line_breaks_and_ends(hermes: Daemon, path: str) -> None:
    asked = sampled(hermes, path, {"xtc_probability": 0.5, "xtc_threshold": 0.2})
    assert asked.xtc == Xtc(0.5, 0.2, (ord("\n"), END_OF_TEXT))
    assert sampled(hermes, path, {"xtc_probability": 0, "xtc_threshold": 0.2}).xtc is None


@pytest.mark.parametrize("path", PATHS)
def test_dry_has_its_breakers_as_tokens(hermes: Daemon, path: str) -> None:
    usual = ((ord("\n"),), (ord(":"),), (ord('"'),), (ord("*"),))
    asked = sampled(hermes, path, {"dry_multiplier": 0.8})
    assert asked.dry == Dry(0.8, 1.75, 2, -1, usual)
    others = {"dry_base": 2, "dry_allowed_length": 3, "dry_penalty_last_n": 64}
    asked = sampled(
        hermes, path, {"dry_multiplier": 1, "dry_sequence_breakers": ["ab", "é"], **others}
    )
    assert asked.dry == Dry(1, 2, 3, 64, (tuple(b"ab"), tuple("é".encode())))
    for off in ({"dry_multiplier": 0}, {"dry_multiplier": 1, "dry_penalty_last_n": 0}):
        assert sampled(hermes, path, {**off, "dry_base": 2}).dry is None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "fields",
    [
        {"xtc_probability": 1.5},
        {"xtc_threshold": -1},
        {"dry_multiplier": -1},
        {"dry_base": 0.5},
        {"dry_allowed_length": -1},
        {"dry_penalty_last_n": -2},
        {"dry_sequence_breakers": [""]},
        {"dry_sequence_breakers": ["x" * 41]},
        {"dry_sequence_breakers": ["x"] * 17},
    ],
    ids=repr,
)
def test_values_beyond_their_limits_are_named(
    hermes: Daemon, path: str, fields: dict[str, Any]
) -> None:
    sent = {"options": fields} if path == "/api/chat" else fields
    assert next(iter(fields)) in message_of(post(hermes, path, sent))


NEUTRAL: dict[str, list[Any]] = {
    "typical_p": [1, 1.0],
    "tfs_z": [1.0],
    "guidance_scale": [1],
    "do_sample": [True],
    "top_n_sigma": [-1, 0],
    "mirostat": [0],
    "samplers": [[]],
    "top_a": [0.0],
    "repeat_last_n": [64, -1],
    "skip_special_tokens": [True],
    "include_reasoning": [True],
    "reasoning_format": ["auto"],
    "negative_prompt": [""],
    "include_stop_str_in_output": [False],
}
"""Values that change nothing, and that clients send with all their settings."""

LOUD: dict[str, dict[str, Any]] = {
    name: {name: value}
    for name in [*ForeignFields.model_fields, *ForeignSamplers.model_fields]
    for value in [
        False
        if name
        in {
            *("do_sample", "skip_special_tokens", "include_reasoning", "separate_reasoning"),
            "parse_tool_calls",
        }
        else 2
    ]
} | {"repeat_last_n": {"repeat_last_n": 64, "frequency_penalty": 0.5}}
"""Of each field a value that would change the answer."""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", LOUD)
def test_what_would_change_the_answer_is_refused_by_its_name(
    hermes: Daemon, path: str, name: str
) -> None:
    fields = LOUD[name]
    if path == "/api/chat":
        if name not in ForeignSamplers.model_fields:
            return
        fields = {"options": fields}
    assert name in message_of(post(hermes, path, fields))


@pytest.mark.parametrize("path", PATHS)
def test_what_changes_nothing_passes(hermes: Daemon, path: str) -> None:
    for name, values in NEUTRAL.items():
        for value in values:
            fields: dict[str, Any] = {name: value}
            answer = post(hermes, path, {"options": fields} if path == "/api/chat" else fields)
            assert answer.status_code == 200, (name, value, answer.text)
