"""What a model says, as items and back: the history is what was said, whatever was said."""

import json
from itertools import count, pairwise
from pathlib import Path
from tempfile import mkdtemp

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from server.dialects.responses.items import (
    ConversationItem,
    CustomTool,
    FunctionTool,
    NamespaceTool,
)
from server.dialects.responses.output import seal, unseal
from server.dialects.responses.read import chat_messages
from server.dialects.responses.store import StoredConversation
from server.dialects.responses.tools import RequestTools
from server.dialects.responses.write import ResponseForm
from server.generation.choice import AnswerUsage
from server.generation.seals import Seals
from server.generation.template import TemplateTraits, in_place, template_messages
from server.parsing.reader import AnswerPart, CallArguments, CallBegun, Content, Reasoning
from server.record import Principal, RequestRecord
from tests.contract.fake_engine import ByteTokenizer
from tests.scripted_answers import events_of, scripted_choice

ITEMS: TypeAdapter[list[ConversationItem]] = TypeAdapter(list[ConversationItem])

SEALS = Seals(lambda: Path(mkdtemp()))

LOOK = FunctionTool(type="function", name="look")
PATCH = CustomTool(type="custom", name="patch")
AGENTS = NamespaceTool(type="namespace", name="agents", tools=[LOOK, PATCH])
TOOLBOX = RequestTools([LOOK, PATCH, AGENTS])
USERS = TemplateTraits(late_system="user")
TOOLS = TemplateTraits(late_system="user", after_results="tool")
FUNCTIONS = ["look", "agents__look", "made_up"]
CUSTOM = ["patch", "agents__patch"]

TEXT = st.text(min_size=1, max_size=20)
SAID = st.builds(Content, TEXT) | st.builds(Reasoning, TEXT)
OBJECTS = st.dictionaries(st.text(max_size=3), st.integers() | TEXT, max_size=2)
CALLS = st.tuples(st.sampled_from(FUNCTIONS), OBJECTS) | st.tuples(
    st.sampled_from(CUSTOM), st.builds(lambda text: {"input": text}, st.text(max_size=20))
)
ANSWERS = st.lists(SAID | CALLS, min_size=1, max_size=8)


def parts(answer: list[AnswerPart | tuple[str, object]], slice_length: int) -> list[AnswerPart]:
    """The answer as a stream has it: arguments in slices."""
    made: list[AnswerPart] = []
    indices = count()
    for said in answer:
        if not isinstance(said, tuple):
            made.append(said)
            continue
        name, arguments = said
        index, text = next(indices), json.dumps(arguments, ensure_ascii=False)
        made.append(CallBegun(index, f"call_{index}", name))
        made += [
            CallArguments(index, text[at : at + slice_length])
            for at in range(0, len(text), slice_length)
        ]
    return made


def form(summary: bool, sealed: bool) -> ResponseForm:
    return ResponseForm(
        id="resp_id",
        head=b'{"id":"resp_id"}',
        tools=TOOLBOX.by_function,
        with_summary=summary,
        with_sealed_reasoning=sealed,
        tokenizer=ByteTokenizer(),
        record=RequestRecord("id", Principal("client")),
        context=StoredConversation(),
        store=None,
        is_background=False,
    )


@given(ANSWERS, st.integers(1, 20), st.booleans(), st.booleans())
def test_an_answer_comes_back_as_it_was(
    answer: list[AnswerPart | tuple[str, object]], slice_length: int, summary: bool, sealed: bool
) -> None:
    said_parts = parts(answer, slice_length)
    choice = scripted_choice(said_parts)
    choice.feed(events_of(said_parts))
    response = json.loads(form(summary, sealed).whole([choice], AnswerUsage(7, 3, 5)))
    messages = chat_messages(None, ITEMS.validate_python(response["output"]), SEALS)
    content = "".join(said.text for said in answer if isinstance(said, Content))
    reasoning = "".join(said.text for said in answer if isinstance(said, Reasoning))
    calls = [said for said in answer if isinstance(said, tuple)]
    if not content and not calls:
        assert not messages, "reasoning alone is nothing that was said"
        return
    (message,) = messages
    assert (message.text, message.reasoning) == (content, reasoning)
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == calls
    ids = [item["id"] for item in response["output"]]
    assert len(set(ids)) == len(ids)


MESSAGES = st.builds(
    lambda role, text: {"type": "message", "role": role, "content": text},
    st.sampled_from(["system", "developer", "user", "assistant"]),
    TEXT,
)
CALL_ITEMS = st.builds(
    lambda id: {"type": "function_call", "call_id": id, "name": "look", "arguments": "{}"},
    st.sampled_from("abc"),
)
OUTPUT_ITEMS = st.builds(
    lambda id: {"type": "function_call_output", "call_id": id, "output": "x"},
    st.sampled_from("abc"),
)
REASONING = st.builds(
    lambda text: {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}, TEXT
)


@given(
    st.none() | TEXT,
    st.lists(MESSAGES | CALL_ITEMS | OUTPUT_ITEMS | REASONING, max_size=12),
    st.sampled_from([USERS, TOOLS]),
)
def test_nothing_is_lost_and_everybody_speaks_where_the_template_has_a_place(
    instructions: str | None, items: list[dict[str, object]], roles_there: TemplateTraits
) -> None:
    said = chat_messages(instructions, ITEMS.validate_python(items), SEALS)
    messages = template_messages(in_place(said, roles_there), roles_there)
    roles = [message["role"] for message in messages]
    assert "developer" not in roles
    assert "system" not in roles[1:]
    if roles_there is TOOLS:
        assert ("tool", "user") not in pairwise(roles)
    assert ("system" in roles) == (bool(said) and said[0].role == "system")
    if items and items[0]["type"] != "reasoning":
        is_told_first = items[0].get("role") in {"system", "developer"}
        assert ("system" in roles) == (instructions is not None or is_told_first)
    calls = [call.id for message in said for call in message.calls]
    assert calls == [item["call_id"] for item in items if item["type"] == "function_call"]
    results = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    outputs = [item["call_id"] for item in items if item["type"] == "function_call_output"]
    left = iter(results)  # among which may be words of others where only a result may stand
    assert all(id in left for id in outputs)
    assert roles_there is TOOLS or results == outputs
    spoken = "".join(str(item["content"]) for item in items if item["type"] == "message")
    assert sum(len(str(message["content"])) for message in messages) >= len(spoken)


@given(st.text())
def test_seals_are_opened(text: str) -> None:
    assert unseal(seal(text)) == text


@given(st.text() | st.text().map("rootstock1:".__add__))
def test_what_is_no_seal_opens_to_nothing_and_harms_nobody(text: str) -> None:
    assert isinstance(unseal(text), str)
