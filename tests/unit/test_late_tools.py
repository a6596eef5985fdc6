"""Tools that come, go and change places in the midst of a conversation: its prompt only grows."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from transformers import PreTrainedTokenizerFast

from measuring.random_checkpoint import tiny_tokenizer
from server.generation.conversation import Chat, Conversation, Message, texts
from server.generation.history import Replays
from server.generation.late_tools import MAX_CONVERSATIONS, ToolPlaces
from server.generation.plan import AnswerPlan, AnswerPlanner
from server.generation.prompt import PromptEncoder
from server.generation.request_fields import SampledRequest
from server.generation.tools import Tool, ToolCall, ToolChoice, function_tool
from server.settings.models import ConversationSettings
from tests.answering import checkpoint_with
from tests.contract.fake_engine import FakeEngine
from tests.profiles import examples

_TURNS = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>\n{{ c.function|tojson }}\n</tool_call>"
    "{%- endfor %}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
TEMPLATES = {
    "lines": "{%- if tools %}Tools:\n<tools>{%- for t in tools %}\n{{ t|tojson }}{%- endfor %}\n"
    "</tools>{%- endif %}" + _TURNS,
    "list": "{%- if tools %}[AVAILABLE_TOOLS]{{ tools|tojson }}[/AVAILABLE_TOOLS]{%- endif %}"
    + _TURNS,
    "words": "{%- for t in tools or [] %}## {{ t.function.name }}\n{{ t.function.description }}\n"
    "{%- for p in t.function.parameters.properties|items %}- {{ p[0] }}\n{%- endfor %}"
    "{%- endfor %}" + _TURNS,
    "control tokens": "{%- for t in tools or [] %}<|im_start|>{{ t.function.name }}<|im_end|>"
    "{%- endfor %}" + _TURNS,
    "no tools": _TURNS,
}
SALT = "salt"


@cache
def model(template: str) -> tuple[PromptEncoder, AnswerPlanner]:
    fast = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(), eos_token="<|im_end|>")
    fast.add_tokens(["<tool_call>"])
    tokenizer = checkpoint_with(fast, TEMPLATES[template])
    parser = "generic" if template == "no tools" else "hermes"
    planner = AnswerPlanner(tokenizer, ConversationSettings(tool_parser=parser))
    card = replace(FakeEngine().card, vocab_size=4096, max_context_tokens=9999, arena_tokens=9999)
    return PromptEncoder(tokenizer, planner, card), planner


def tool(name: str, about: str = "does something", *, is_deferred: bool = False) -> Tool:
    parameters = {"type": "object", "properties": {f"{name}_argument": {"type": "string"}}}
    return function_tool(name, about, parameters, is_deferred=is_deferred)


def said(role: str, text: str, *, tools: Sequence[Tool] = ()) -> Message:
    return Message(role=role, parts=texts(text), tools=tools)  # type: ignore[arg-type]


USER = said("user", "Hi")


def called(name: str, id: str) -> Message:
    return Message(role="assistant", calls=[ToolCall(id, name, "{}")])


def result(id: str, tools: Sequence[Tool] = ()) -> Message:
    return Message(role="tool", parts=texts("It is done."), answered_call=id, tools=tools)


def conversation(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    choice: ToolChoice = ToolChoice(),  # noqa: B008 - it is frozen
) -> Conversation:
    return Conversation(
        messages=messages, tools=tools, tool_choice=choice, add_generation_prompt=False
    )


def rendered(template: str, chat: Conversation, memory: Replays) -> str:
    prompts, _ = model(template)
    return prompts.decode(prompts.chat(chat, memory, SALT).tokens, "tokens")


def planned(template: str, chat: Conversation) -> AnswerPlan:
    _, planner = model(template)
    return planner.plan(Chat(conversation=chat, sampling=SampledRequest()), [1])


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prompt_only_grows_whatever_becomes_of_the_tools(template: str) -> None:
    for seed in range(examples(40)):
        draw = random.Random(seed)
        pool = [tool(f"tool_{index}") for index in range(6)]
        declared = draw.sample(pool, draw.randint(1, 4))
        messages, memory = [USER], Replays()
        before = rendered(template, conversation(messages, declared), memory)
        for turn in range(5):
            fetched = draw.sample(pool, draw.randint(0, 2))
            messages += [called("tool_0", f"{seed}-{turn}"), result(f"{seed}-{turn}", fetched)]
            if draw.random() < 0.5:
                messages.append(said("user", f"Go on {turn}."))
            if draw.random() < 0.7 and turn:
                declared = draw.sample(pool, draw.randint(0, len(pool)))
            else:
                declared = draw.sample(declared, len(declared))
            choice = ToolChoice("none") if draw.random() < 0.3 else ToolChoice()
            chat = conversation(messages, declared, choice)
            now = rendered(template, chat, memory)
            assert now.startswith(before), f"seed {seed}, turn {turn}"
            assert now == rendered(template, chat, memory), "the same again"
            for each in chat.callable_tools:
                assert each.name in now, f"seed {seed}, turn {turn}"
            before = now


@pytest.mark.parametrize("template", ["lines", "list", "words"])
def test_a_late_tool_is_described_as_the_template_describes_one(template: str) -> None:
    late, first = tool("late"), tool("first")
    chat = conversation([USER, called("first", "a"), result("a", [late])], [first, late])
    text = rendered(template, chat, Replays())
    head = rendered(template, conversation([USER], [first, late]), Replays())
    at = text.index("can be called")
    described = text[at:].split("\n", 1)[1].partition("<|im_end|>")[0].strip(", \n")
    assert "late_argument" in described
    assert described in head


@pytest.mark.parametrize("template", ["control tokens", "no tools"])
def test_a_late_tool_is_json_where_the_template_has_no_form_for_it(template: str) -> None:
    late = tool("late")
    chat = conversation([USER, called("first", "a"), result("a", [late])], [tool("first")])
    assert '{"name": "late", "description": "does something"' in rendered(template, chat, Replays())


def test_a_deferred_tool_is_unknown_until_a_message_names_it() -> None:
    late, first = tool("late", is_deferred=True), tool("first")
    chat = conversation([USER], [late, first])
    assert "late" not in rendered("lines", chat, Replays())
    assert planned("lines", chat).functions.keys() == {"first"}
    told = conversation([USER, called("first", "a"), result("a", [late])], [late, first])
    assert planned("lines", told).functions.keys() == {"first", "late"}
    chosen = replace(chat, tool_choice=ToolChoice("required", frozenset({"late"})))
    assert "late_argument" in rendered("lines", chosen, Replays())
    assert planned("lines", chosen).functions.keys() == {"late"}


def test_what_an_assistant_said_is_not_changed_by_tools_that_it_found() -> None:
    """Hosted searches are blocks of its message. The tools are as the request declares them."""
    found = replace(said("assistant", "I found one."), tools=[tool("late", "found")])
    chat = conversation([USER, found, said("user", "Go on.")], [tool("first"), tool("late")])
    placed = ToolPlaces().place(chat, SALT)
    assert [(at, each.name) for at, each in placed.late] == [(2, "late")]
    assert b"does something" in placed.late[0][1].json
    assert "I found one.<|im_end|>" in rendered("lines", chat, Replays())


def test_tools_that_come_before_anything_is_said_are_the_head() -> None:
    given = [Message(role="system", tools=[tool("a")]), said("system", "Be brief."), USER]
    text = rendered("lines", conversation(given, []), Replays())
    assert text == rendered("lines", conversation(given[1:], [tool("a")]), Replays())


def test_where_none_may_be_called_the_tools_stay_and_the_marker_is_forbidden() -> None:
    chat = conversation([USER], [tool("a")])
    none = replace(chat, tool_choice=ToolChoice("none"))
    assert rendered("lines", none, Replays()) == rendered("lines", chat, Replays())
    _, planner = model("lines")
    assert planner.marker is not None
    assert planned("lines", none).forbidden[0] == planner.marker.tokens
    assert not planned("lines", chat).forbidden
    assert not planned("lines", conversation([USER], [])).forbidden, "nothing speaks of calls"


def test_without_tools_the_ones_of_the_conversation_stay_and_cannot_be_called() -> None:
    memory = Replays()
    messages = [USER, called("a", "id"), result("id")]
    before = rendered("lines", conversation(messages, [tool("a")]), memory)
    messages += [said("assistant", "Done."), said("user", "Sum it up.")]
    chat = conversation(messages, [])
    assert rendered("lines", chat, memory).startswith(before)
    assert not planned("lines", chat).functions
    assert planned("lines", chat).forbidden


def test_a_tool_with_another_declaration_is_declared_anew() -> None:
    memory = Replays()
    messages = [USER, called("a", "id"), result("id")]
    rendered("lines", conversation(messages, [tool("a", "old")]), memory)
    messages += [said("assistant", "Done."), said("user", "Go on.")]
    text = rendered("lines", conversation(messages, [tool("a", "new")]), memory)
    assert "new" in text
    assert "old" not in text


@pytest.mark.parametrize(
    ("salt", "messages"),
    [
        ("other", [USER, called("a", "id"), result("id")]),
        (SALT, [USER, called("a", "another id"), result("another id")]),
        (SALT, [USER, said("assistant", "Hello.")]),
    ],
    ids=["salt", "call", "beginning"],
)
def test_nobody_sees_the_tools_of_another_conversation(
    salt: str, messages: Sequence[Message]
) -> None:
    places = ToolPlaces()
    mine = [USER, called("a", "id"), result("id")]
    for known in (mine[:1], mine):
        places.place(conversation(known, [tool("a"), tool("secret")]), SALT)
    found = places.place(conversation([*messages, said("user", "Go on.")], [tool("a")]), salt)
    assert [each.name for each in found.head] == ["a"]
    assert not found.late


def test_what_is_remembered_is_bounded() -> None:
    places = ToolPlaces(max_conversations=3, max_bytes=10_000)

    def is_known(index: int) -> bool:
        messages = [USER, called("a", f"{index}"), result(f"{index}"), said("user", "Go on.")]
        found = ToolPlaces.place(places, conversation(messages, [tool("b"), tool("a")]), SALT)
        return found.head[0].name == "a"

    def tell(index: int, about: str) -> None:
        messages = [USER, called("a", f"{index}"), result(f"{index}")]
        places.place(conversation(messages, [tool("a", about), tool("b")]), SALT)

    for index in range(5):
        tell(index, "does something")
    assert [is_known(index) for index in (0, 4)] == [False, True]
    tell(9, "x" * 20_000)
    assert not is_known(4)
    places.clear()
    assert not is_known(9)
    assert MAX_CONVERSATIONS > 3
