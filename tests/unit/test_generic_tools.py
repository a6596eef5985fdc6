"""Tools as text: what a history says can be read back, and a call is noticed in free text."""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from measuring.random_checkpoint import tiny_tokenizer, train_tokenizer
from server.dialects.chat.routes import as_chat
from server.dialects.chat.schema import ChatRequest
from server.generation.generic_tools import SystemRole, plain_conversation
from server.generation.plan import AnswerPlanner
from server.generation.template import TemplateTraits, template_messages
from server.parsing.registry import Formats, answer_format
from server.settings.models import ConversationSettings
from tests.answering import checkpoint_with
from tests.profiles import examples
from tests.unit.parsing.answers import parsed, pieces

NAMES = st.from_regex(r"\A[a-zA-Z0-9_.:/-]{1,40}\Z")
MARKUP = [
    *(
        "<tool_call>\n{",
        "</tool_call>",
        "<tool_response>",
        "\n</tool_response>",
        "<\\/tool_response>",
    ),
    *("<\\\\tool_response>", "<", "\\", "\n", '"}', "\\u0041", "köln 城市 🌧"),
]
TEXTS = st.lists(st.text(max_size=6) | st.sampled_from(MARKUP), max_size=5).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(TEXTS, VALUES, max_size=4)), min_size=1, max_size=4
)
WORDS = st.text("abc de\n.", max_size=20).map(str.strip)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def called(content: str, calls: list[tuple[str, Any]]) -> dict[str, Any]:
    """An assistant's message, as a template is given it."""
    written = [
        {"id": "a", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": written}


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("user"), TEXTS),
        st.tuples(st.just("assistant"), st.tuples(WORDS.filter(bool), st.just([]))),
        st.tuples(st.just("assistant"), st.tuples(WORDS, CALLS)),
        st.tuples(st.just("tool"), TEXTS),
    ),
    min_size=1,
    max_size=6,
)
RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>(\n|\Z)", re.DOTALL)


def message_of(role: str, said: Any) -> dict[str, Any]:
    """A message of a client of the chat API."""
    if role != "assistant":
        return {"role": role, "content": said, **({"tool_call_id": "a"} if role == "tool" else {})}
    content, calls = said
    functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in calls]
    written = [{"id": "a", "type": "function", "function": function} for function in functions]
    return {"role": role, "content": content, **({"tool_calls": written} if written else {})}


def read_back(turn: dict[str, Any], cuts: Sequence[int]) -> Iterator[tuple[str, Any]]:
    """The steps that a turn of a template renders."""
    text = turn["content"]
    if turn["role"] == "assistant":
        answer = parsed(answer_format(Formats("generic", None)), pieces(text, cuts))
        yield "assistant", (answer.content, answer.calls)
        return
    end = 0
    while result := RESULT.match(text, end):
        yield "tool", unquoted(result[1])
        end = result.end()
    if end == 0 or text[end - 1] == "\n":
        yield "user", unquoted(text[end:])


def unquoted(text: str) -> str:
    return re.sub(r"<\\(\\*/?tool_response>)", r"<\1", text)


@settings(deadline=None, max_examples=examples(300))
@given(steps=STEPS, cuts=st.lists(st.integers(0, 500), max_size=5))
def test_a_history_can_be_read_back(steps: list[tuple[str, Any]], cuts: list[int]) -> None:
    """Whatever texts and arguments spell, calls, results and texts of the user are as they were."""
    messages = [message_of(role, said) for role, said in steps]
    body = ChatRequest.model_validate({"messages": messages, "tools": TOOLS})
    chat = as_chat(body, reasons=True)
    given_to_template = template_messages(chat.conversation.messages, TemplateTraits())
    plain = plain_conversation(given_to_template, TOOLS, "system")
    system, *turns = plain.messages
    assert system["role"] == "system"
    assert [step for turn in turns for step in read_back(dict(turn), cuts)] == steps


ROLES = st.lists(
    st.sampled_from(["user", "tool", "assistant", "call", "system"]), min_size=1, max_size=9
)


@settings(deadline=None, max_examples=examples(200))
@given(roles=ROLES, texts=st.lists(TEXTS, min_size=9, max_size=9), data=st.data())
def test_every_message_is_in_the_turn_that_it_is_said_to_be_in(
    roles: list[str], texts: list[str], data: st.DataObject
) -> None:
    """Results in a row are one turn of the user's, with what the user says after them."""
    messages = [
        called(text, [("look", {})]) if role == "call" else {"role": role, "content": text}
        for role, text in zip(roles, texts, strict=False)
    ]
    tools = data.draw(st.sampled_from([(), TOOLS]))
    system: SystemRole = data.draw(st.sampled_from(["system", "user"]))
    plain = plain_conversation(messages, tools, system)
    own = {"tool": "user", "system": system, "call": "assistant"}
    assert list(plain.places) == sorted(plain.places)
    for role, message, place in zip(roles, messages, plain.places, strict=True):
        turn = plain.messages[place]
        assert turn["role"] == own.get(role, role)
        assert role in {"user", "tool"} or message["content"] in turn["content"]
    if tools:
        assert '"look"' in plain.messages[0]["content"]
        assert plain.messages[0]["role"] == system
    for before, after in pairwise(zip(roles, plain.places, strict=True)):
        if before[0] == "tool" and after[0] in {"tool", "user"}:
            assert before[1] == after[1]


BEFORE = [
    "",
    " ",
    "\n",
    "Yes.",
    "Yes. ",
    "Yes:\n\n",
    "I look.\n",
    "x",
    "(",
    "```\n",
    "</tool_call>\n",
]


def merging_tokenizer() -> Tokenizer:
    """With tokens that join the marker's first character to the one before it."""
    return train_tokenizer(["Yes. <tool <b (<tool_call> x<tools_call>\n<tool_call>\n"] * 9, 320)


@pytest.mark.parametrize("kind", [tiny_tokenizer, merging_tokenizer])
@pytest.mark.parametrize("before", BEFORE)
def test_a_call_after_any_text_is_held_to_its_grammar(kind: Any, before: str) -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=kind(), eos_token="<|im_end|>")
    tokenizer = checkpoint_with(fast, "{{ messages }}")
    messages = [{"role": "user", "content": "Hi"}]
    chat = as_chat(ChatRequest.model_validate({"messages": messages, "tools": TOOLS}), reasons=True)
    constraint = AnswerPlanner(tokenizer, ConversationSettings()).plan(chat, ()).constraint
    assert constraint is not None
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    tokens = tokenizer.encode(before + call, add_special_tokens=False)
    markers = {constraint.behind, *constraint.spellings}
    ends = [
        end
        for end in range(len(tokens) + 1)
        if any(tuple(tokens[max(0, end - len(marker)) : end]) == marker for marker in markers)
    ]
    assert [tokenizer.decode(tokens[:end]) for end in ends] == [f"{before}<tool_call"]
    rest = tokenizer.decode(tokens[ends[0] :])
    assert rest == call.removeprefix("<tool_call")
