"""Conversations from elsewhere are rendered by templates that take less than they have."""

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from measuring.random_checkpoint import tiny_tokenizer
from server.dialects.chat.schema import ChatRequest
from server.generation.history import Replays
from server.generation.plan import AnswerPlanner
from server.generation.prompt import PromptEncoder
from server.generation.template import TemplateTraits
from server.settings.models import ConversationSettings
from tests.answering import checkpoint_with
from tests.contract.fake_engine import FakeEngine
from tests.profiles import examples

UNTOOLED = ConversationSettings(tool_parser="none")
ARGUMENTS = {
    "items": "{%- for k, v in c.function.arguments|items %}{{ k }}={{ v|tojson }};{%- endfor %}",
    "tojson": "{{ c.function.arguments|tojson }}",
    "printed": "{{ c.function.arguments }}",
    "concatenated": "{{ '' + c.function.arguments }}",
}
IDS = {
    "any": "",
    "nine": "{%- for m in messages %}{%- for id in (m.tool_calls or [])|map(attribute='id') %}"
    "{%- if id|length != 9 %}{{ raise_exception('an id has nine characters') }}{%- endif %}"
    "{%- endfor %}{%- if m.role == 'tool' and m.tool_call_id|length != 9 %}"
    "{{ raise_exception('an id has nine characters') }}{%- endif %}{%- endfor %}",
}
USERS = {
    "optional": "",
    "needed": "{%- if not messages|selectattr('role', 'equalto', 'user')|list %}"
    "{{ raise_exception('no user query found') }}{%- endif %}",
    "first": "{%- set said = messages|rejectattr('role', 'equalto', 'system')|list %}"
    "{%- if not said or said[0].role != 'user' %}{{ raise_exception('user first') }}{%- endif %}",
}
SYSTEMS = {
    "system": "",
    "user": "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system first') }}{%- endif %}{%- endfor %}",
}
SYSTEMS["none"] = SYSTEMS["user"].replace(" and not loop.first", "")
SAME = {
    "apart": "",
    "joined": "{%- for m in messages %}{%- if loop.previtem and loop.previtem.role == m.role "
    "and m.role == 'user' %}{{ raise_exception('roles alternate') }}{%- endif %}{%- endfor %}",
}
SAME["alternating"] = (  # as Mistral's: calls and results do not count
    "{%- set others = messages[1:] if messages[0].role == 'system' else messages %}"
    "{%- set others = others|rejectattr('tool_calls', 'defined')|list %}"
    "{%- for m in others|rejectattr('role', 'equalto', 'tool') %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles alternate') }}{%- endif %}{%- endfor %}"
)
CONTENT = {
    "text": "{{ '' + m.content }}",
    "parts": "{%- for p in m.content %}{{ p.text }}\n{%- endfor %}",
}
TOOLS = {
    "declared": "{%- for t in tools or [] %}{{ t.function.name }}{%- endfor %}",
    "completed": "{%- for t in tools or [] %}{{ t.function.name + t.function.description }}"
    "{%- for p in t.function.parameters.properties|items %}{{ p }}{%- endfor %}{%- endfor %}",
}


@dataclass(frozen=True)
class Kind:
    """A template, by the names of its parts above."""

    arguments: str = "tojson"
    ids: str = "any"
    users: str = "optional"
    systems: str = "system"
    same: str = "apart"
    content: str = "text"
    tools: str = "declared"

    @property
    def template(self) -> str:
        checks = IDS[self.ids] + USERS[self.users] + SYSTEMS[self.systems] + SAME[self.same]
        return (
            checks
            + TOOLS[self.tools]
            + "{%- for m in messages %}[{{ m.role }}]"
            + CONTENT[self.content]
            + "{%- for c in m.tool_calls or [] %}<{{ c.id }} {{ c.function.name }} "
            + ARGUMENTS[self.arguments]
            + ">{%- endfor %}{%- if m.role == 'tool' %}({{ m.tool_call_id }}){%- endif %}"
            + "{%- endfor %}"
        )

    @property
    def traits(self) -> TemplateTraits:
        as_text = self.arguments in {"printed", "concatenated"}
        alternates = self.same == "alternating"
        takes_late_system = self.systems == "system" and not alternates
        return TemplateTraits(
            content=self.content,  # type: ignore[arg-type]
            system="user" if self.systems == "none" else "system",
            late_system="system" if takes_late_system else "user",
            user_turn="first" if alternates else self.users,  # type: ignore[arg-type]
            same_role="apart" if self.same == "apart" else "joined",
            after_results="tool" if alternates else "user",
            arguments="text" if as_text else "object",
            call_ids=self.ids,  # type: ignore[arg-type]
            tools=self.tools,  # type: ignore[arg-type]
        )


KINDS = st.builds(
    Kind,
    arguments=st.sampled_from([*ARGUMENTS]),
    ids=st.sampled_from([*IDS]),
    users=st.sampled_from([*USERS]),
    systems=st.sampled_from([*SYSTEMS]),
    same=st.sampled_from([*SAME]),
    content=st.sampled_from([*CONTENT]),
    tools=st.sampled_from([*TOOLS]),
)


@cache
def encoder(kind: Kind) -> PromptEncoder:
    fast = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(), eos_token="<|im_end|>")
    card = replace(FakeEngine().card, vocab_size=4096, max_context_tokens=4096, arena_tokens=4096)
    tokenizer = checkpoint_with(fast, kind.template)
    return PromptEncoder(tokenizer, AnswerPlanner(tokenizer, UNTOOLED), card)


def rendered(kind: Kind, *messages: dict[str, Any], **fields: Any) -> str:
    body = ChatRequest.model_validate({"messages": [*messages], **fields})
    prompts = encoder(kind)
    return prompts.decode(prompts.chat(body.conversation, Replays(), "").tokens, "tokens")


def called(arguments: str, id: str = "abcdefghi") -> dict[str, Any]:
    call = {"id": id, "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def result(text: str = "R", id: str = "abcdefghi") -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": id}


HI = {"role": "user", "content": "Hi"}


@given(KINDS)
@settings(deadline=None, max_examples=examples(100))
def test_what_a_template_takes_is_found(kind: Kind) -> None:
    assert encoder(kind).traits == kind.traits


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_are_json_in_every_template(arguments: str) -> None:
    said = rendered(Kind(arguments=arguments), HI, called('{"a": [1, {"b": null}]}'), result())
    value = '[1, {"b": null}]'
    assert (f"a={value};" if arguments == "items" else f'{{"a": {value}}}') in said


@pytest.mark.parametrize(
    ("broken", "read"),
    [
        ('{"a": "x', '{"a": "x"}'),
        ('{"a": 1, "b": ', '{"a": 1}'),
        ("", "{}"),
        ("null", "{}"),
        ("[1, 2]", '{"arguments": "[1, 2]"}'),
        ("rm -rf", '{"arguments": "rm -rf"}'),
        (r'{"a": "\ud800"}', '{"a": "\ufffd"}'),
    ],
)
def test_arguments_that_are_no_object_are_made_one(broken: str, read: str) -> None:
    history = (HI, called(broken), result("not run"), called('{"b": 2}'), result(), HI)
    said = rendered(Kind(), *history)
    assert f"f {read}>" in said
    assert 'f {"b": 2}>' in said, "one call does not decide for the others"
    rendered(Kind(arguments="items"), *history)


@pytest.mark.parametrize("id", ["call_0123456789abcdef01234567", "", "abc-efghi", "Ab0000009"])
def test_foreign_ids_get_the_templates_form(id: str) -> None:
    said = rendered(Kind(ids="nine"), HI, called("{}", id), result(id=id), called("{}"), result())
    found = re.findall(r"[<(]([a-zA-Z0-9]{9})[ )]", said)
    assert found[0] == found[1]
    assert found[2:] == ["abcdefghi"] * 2
    assert (found[0] == id) == (id == "Ab0000009"), "an id of the form stays"


def test_results_without_ids_answer_the_calls_in_their_order() -> None:
    calls = called("{}", "one")
    calls["tool_calls"].append({"id": "", "function": {"name": "f", "arguments": "{}"}})
    nameless = {"role": "tool", "content": "R"}
    said = rendered(Kind(ids="nine"), HI, calls, nameless, nameless)
    first, second, *answered = re.findall(r"[<(]([a-zA-Z0-9]{9})[ )]", said)
    assert answered == [first, second]


@pytest.mark.parametrize("users", ["needed", "first"])
@pytest.mark.parametrize(
    "history",
    [
        [{"role": "system", "content": "S"}],
        [{"role": "system", "content": "S"}, called("{}"), result()],
        [called("{}"), result()],
    ],
)
def test_a_history_without_a_user_is_served(users: str, history: list[dict[str, Any]]) -> None:
    assert rendered(Kind(users=users), *history).count("[user]") == 1
    assert "[user]" not in rendered(Kind(), *history)


def test_a_user_is_added_only_where_one_is_missing() -> None:
    history = [{"role": "assistant", "content": "Yes?"}, HI]
    assert rendered(Kind(users="needed"), *history) == "[assistant]Yes?[user]Hi"
    assert rendered(Kind(users="first"), *history) == "[user][assistant]Yes?[user]Hi"


def test_what_is_said_in_place_of_a_result_is_the_result() -> None:
    said = rendered(Kind(same="alternating"), HI, called("{}", "abcdefghi"), HI)
    assert said == "[user]Hi[assistant]<abcdefghi f {}>[tool]Hi(abcdefghi)"


def test_tools_without_parameters_are_completed() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert rendered(Kind(tools="completed"), HI, tools=tools) == "look[user]Hi"


STEPS = st.lists(
    st.sampled_from(["system", "user", "assistant", "call"])
    | st.tuples(
        st.sampled_from(["{}", '{"a": 1}', '{"a": "x', "[]", "none", r'{"a": "\udfff"}']),
        st.sampled_from(["abcdefghi", "call_1", "", "toolu_01ABCDEFGHIJKLMNOPQRSTUV"]),
    ),
    min_size=1,
    max_size=6,
)


@given(KINDS, STEPS)
@settings(deadline=None, max_examples=examples(200))
def test_no_history_is_refused(kind: Kind, steps: list[Any]) -> None:
    """And nothing of it is left out, or in another place."""
    messages, words = list[dict[str, Any]](), list[str]()
    for number, step in enumerate(steps):
        words.append(f"word{number}.")
        if step == "call":
            words.pop()
            messages.append(called("{}"))
        elif isinstance(step, str):
            messages.append({"role": step, "content": words[-1]})
        else:
            arguments, id = step
            messages += [called(arguments, id), result(words[-1], id)]
    said = rendered(kind, *messages)
    assert re.findall(r"word\d+\.", said) == words
    assert said.count("<") - said.count("<system-") - said.count("</system-") == len(
        [step for step in steps if step == "call" or not isinstance(step, str)]
    )
