"""What becomes of a Messages body: what the template is given, and what the engine is asked."""

import json
import logging
from itertools import pairwise
from typing import Any

import pytest

from engine.values.model import NO_REPLAYS
from engine.values.request import GrammarKind
from tests.contract.fake_engine import ByteTokenizer, Script
from tests.contract.messages.scripted import PING, TOOLS, WEATHER, MessagesDaemon
from tests.contract.scripted import CALL, USER, RecordingTokenizer

MARK = {"cache_control": {"type": "ephemeral"}}
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=sdk-cli;"


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words} | fields


def given(daemon: MessagesDaemon, messages: list[Any], **fields: Any) -> list[dict[str, Any]]:
    """What the template is given of the messages."""
    daemon.create(messages=messages, **fields)
    return [dict(message) for message in daemon.given[0]]


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def call(id: str, input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "get_weather", "input": input}


def result(id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id} | fields


def test_a_tool_loop_reaches_the_template_as_templates_want_it(hermes: MessagesDaemon) -> None:
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "anything"}
    hidden = {"type": "redacted_thinking", "data": "xyz"}
    messages = [
        user(text("How is"), text("the weather?", **MARK)),
        assistant(thinking, hidden, text("Let me "), text("see."), call("a", CALL[1])),
        assistant(call("b", {})),
        user(
            result("a", content="Rain.", is_error=False),
            result("b", content=[text("No"), text("city.")], is_error=True, **MARK),
            result("c"),
            text("Go on."),
        ),
        user(text("Please.")),
    ]
    *told, last = given(hermes, messages, system=[text("Be"), text("brief.", **MARK)], tools=TOOLS)
    reasoning = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "Hm.")
    calls = [
        {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        for id, arguments in (("a", CALL[1]), ("b", {}))
    ]
    assert told == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "How is\nthe weather?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls} | reasoning,
        {"role": "tool", "content": "Rain.", "tool_call_id": "a", "name": "get_weather"},
        {"role": "tool", "content": "Error: No\ncity.", "tool_call_id": "b", "name": "get_weather"},
        {"role": "tool", "content": "", "tool_call_id": "c"},
    ]
    assert last == {"role": "user", "content": "Go on.\nPlease."}


ONCE = {"type": "text", "media_type": "text/plain", "data": "Once upon a time."}
BLOCKS = [text("One."), text("Two.")]
FOUND = {"type": "search_result", "source": "https://example.org/a", "title": "A page"}


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({"type": "document", "source": ONCE}, "Once upon a time."),
        (
            {"type": "document", "source": ONCE, "title": "A tale", "context": "By a friend."},
            "A tale\nBy a friend.\nOnce upon a time.",
        ),
        (
            {"type": "document", "source": {"type": "content", "content": "One.\nTwo."}},
            "One.\nTwo.",
        ),
        (
            {"type": "document", "source": {"type": "content", "content": BLOCKS}, "title": "Two"},
            "Two\nOne.\nTwo.",
        ),
        (FOUND | {"content": BLOCKS}, "A page\nhttps://example.org/a\nOne.\nTwo."),
    ],
    ids=["text", "what is said of it", "content", "blocks", "search result"],
)
def test_documents_and_search_results_are_their_text(
    hermes: MessagesDaemon, block: dict[str, Any], told: str
) -> None:
    """The user's, and what a tool gives back."""
    block = block | {"citations": {"enabled": True}}
    messages = [
        user(block | MARK, text("Go on.")),
        assistant(call("a", {})),
        user(result("a", content=[block])),
    ]
    asked, _, given_back = given(hermes, messages)
    assert asked["content"] == f"{told}\nGo on."
    assert given_back["content"] == told


def test_marks_change_no_prompt(hermes: MessagesDaemon) -> None:
    marked = given(hermes, [user(text("Hi", **MARK))], tools=[PING | MARK], **MARK)
    tools = hermes.given[1]["tools"]
    assert marked == given(hermes, [user(text("Hi"))], tools=[PING])
    assert tools == hermes.given[1]["tools"]


def test_marks_are_counted(hermes: MessagesDaemon, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rootstock")
    inner = result("a", content=[text("x", **MARK)], **MARK)
    messages = [user(text("Hi")), assistant(call("a", {}) | MARK), user(inner)]
    answer = hermes.post(messages=messages, system=[text("x", **MARK)], tools=[PING | MARK], **MARK)
    hermes.post()
    (line,) = (line for line in caplog.messages if answer.headers["request-id"] in line)
    assert " cache-control=6 " in line


def test_tools_are_declared_and_chosen(hermes: MessagesDaemon) -> None:
    hermes.create(tools=[WEATHER | {"type": "custom", "strict": True}, PING])
    weather = {key: WEATHER[key] for key in ("name", "description")}
    assert hermes.given[1]["tools"] == [
        {"type": "function", "function": weather | {"parameters": WEATHER["input_schema"]}},
        {"type": "function", "function": {"name": "ping", "parameters": {"type": "object"}}},
    ]
    choices: list[tuple[dict[str, Any], set[str]]] = [
        ({"type": "any"}, {"get_weather", "ping"}),
        ({"type": "tool", "name": "ping"}, {"ping"}),
    ]
    for choice, names in choices:
        hermes.create(tools=TOOLS, tool_choice=choice)
        constraint = hermes.asked.constraint
        assert constraint is not None
        text = constraint.grammar.text
        assert {name for name in ("get_weather", "ping") if name in text} == names
    for choice in ({"type": "auto"}, {"type": "none"}):
        hermes.create(tools=TOOLS, tool_choice=choice)
        assert hermes.asked.constraint is None
        assert ("tools" in hermes.given[1]) == (choice["type"] == "auto")


FETCH = {"name": "fetch", "description": "Gets a page.", "input_schema": {"type": "object"}}
REFERENCE = {"type": "tool_reference", "tool_name": "fetch"}


def searched(*found: Any) -> list[Any]:
    return [user(text("Hi")), assistant(call("a", {})), user(result("a", content=[*found]))]


@pytest.mark.parametrize("is_deferred", [False, True])
def test_a_tool_that_was_searched_is_described_where_it_was_found(
    hermes: MessagesDaemon, is_deferred: bool
) -> None:
    """Whether the client declares it from the beginning, or from now on, before the others."""
    late = FETCH | ({"defer_loading": True} if is_deferred else {})
    first = given(hermes, searched()[:1], tools=[late, WEATHER] if is_deferred else [WEATHER])
    tools = hermes.given[1]["tools"]
    assert [tool["function"]["name"] for tool in tools] == ["get_weather"]
    asked, _, found = given(hermes, searched(text("One."), REFERENCE), tools=[late, WEATHER])
    assert [asked] == first
    assert hermes.given[1]["tools"] == tools
    said, heading, declared = found["content"].split("\n")
    assert said == "One."
    assert "can be called" in heading
    assert json.loads(declared)["function"]["name"] == "fetch"
    hermes.create(messages=searched(REFERENCE), tools=[late, WEATHER], tool_choice={"type": "any"})
    constraint = hermes.asked.constraint
    assert constraint is not None
    assert "fetch" in constraint.grammar.text


def test_a_reference_to_a_tool_that_is_not_declared_says_so(hermes: MessagesDaemon) -> None:
    *_, found = given(hermes, searched(REFERENCE), tools=[WEATHER])
    assert found["content"] == "There is no tool fetch."


def test_deferred_tools_are_known_where_only_anthropic_could_search_them(
    hermes: MessagesDaemon,
) -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    hermes.create(tools=[FETCH | {"defer_loading": True}, search])
    assert [tool["function"]["name"] for tool in hermes.given[1]["tools"]] == ["fetch"]


@pytest.mark.parametrize("stream", [False, True])
def test_without_calls_the_tools_stay_in_the_prompt_and_no_call_begins(stream: bool) -> None:
    tokenizer = RecordingTokenizer(added_tokens={"<|end|>": 256, "<tool_call>": 255})
    with MessagesDaemon.serving(tokenizer) as marked:
        marked.post(tools=TOOLS)
        tools, prompt = marked.given[1]["tools"], marked.asked.prompt
        marked.post(tools=TOOLS, tool_choice={"type": "none"}, stream=stream)
        assert marked.given[1]["tools"] == tools
        asked = marked.asked
        assert list(asked.prompt) == list(prompt)
        assert asked.constraint is None
        assert (255,) in asked.sampling.bad_words


def test_one_call_at_a_time() -> None:
    tokenizer = RecordingTokenizer(added_tokens={"<|end|>": 256, "<tool_call>": 255})
    with MessagesDaemon.serving(tokenizer) as marked:
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        marked.create(tools=TOOLS, tool_choice=choice)
        assert (constraint := marked.asked.constraint) is not None
        assert not constraint.repeats


def test_tools_that_run_at_anthropic_are_left_out(
    hermes: MessagesDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rootstock")
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    hermes.create(tools=[search], tool_choice={"type": "auto"})
    assert "tools" not in hermes.given[1]
    assert any("web_search_20250305" in line for line in caplog.messages)
    hermes.create(tools=[search, PING])
    assert [tool["function"]["name"] for tool in hermes.given[1]["tools"]] == ["ping"]


def test_what_is_left_out_is_one_line_of_the_log_and_no_client_makes_it_two(
    hermes: MessagesDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rootstock")
    hermes.create(tools=[{"type": f"web_search_{n}\nINFO forged", "name": "s"} for n in range(99)])
    (line,) = (line for line in caplog.messages if "web_search" in line)
    assert "\n" not in line
    assert len(line) < 500


def test_sampling_and_limits(hermes: MessagesDaemon) -> None:
    fields: dict[str, Any] = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": 3}
    hermes.post(stop_sequences=["a", "b"], max_tokens=9, **fields)
    asked = hermes.asked
    assert (asked.stop, asked.max_tokens) == (("a", "b"), 9)
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (
        0.5,
        0.25,
        7,
        3,
    )


def test_thinking(hermes: MessagesDaemon) -> None:
    hermes.create(thinking={"type": "enabled", "budget_tokens": 1024})
    budget = hermes.asked.thinking_budget
    assert budget is not None
    assert budget.tokens == 1024
    assert hermes.given[1] == {"enable_thinking": True}
    hermes.create(thinking={"type": "disabled"})
    assert hermes.given[1] == {"enable_thinking": False}
    hermes.create(thinking={"type": "adaptive"})
    assert hermes.given[1] == {}
    assert hermes.asked.thinking_budget is None


def test_a_model_without_reasoning_is_asked_for_none(hermes: MessagesDaemon) -> None:
    with MessagesDaemon.serving(reasoning_parser="none") as plain:
        plain.create(thinking={"type": "enabled", "budget_tokens": 1024})
        assert plain.asked.thinking_budget is None


@pytest.mark.parametrize(
    ("effort", "told"), [("low", "low"), ("medium", "medium"), ("high", "high"), ("max", "high")]
)
def test_effort(hermes: MessagesDaemon, effort: str, told: str) -> None:
    hermes.create(output_config={"effort": effort})
    assert hermes.given[1]["reasoning_effort"] == told


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_an_answer_of_a_schema(hermes: MessagesDaemon, field: str) -> None:
    format = {"type": "json_schema", "schema": {"type": "object"}}
    fields = {field: {"format": format} if field == "output_config" else format}
    assert hermes.post(**fields).status_code == 200
    constraint = hermes.asked.constraint
    assert constraint is not None
    assert constraint.grammar.kind is GrammarKind.JSON_SCHEMA
    assert constraint.param == "output_config.format"


def test_what_only_anthropic_has_is_passed_over(hermes: MessagesDaemon) -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    fields = {"metadata": {"user_id": "x"}, "service_tier": "auto", "inference_geo": "us"}
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "nobody-knows-2031-01-01"}
    answer = hermes.http.post(
        "/v1/messages?beta=true",
        json={
            "messages": [USER],
            "max_tokens": 5,
            "context_management": {"edits": edits},
            **fields,
        },
        headers=headers,
    )
    assert answer.status_code == 200, answer.text


def test_two_sessions_of_claude_code_share_their_prompt(hermes: MessagesDaemon) -> None:
    """Their system prompts differ in a line at the head, which is no news to a model."""
    seen = []
    for session in ("1c0", "7d4"):
        system: list[Any] = [text(BILLING.format(session)), text("You are an agent.", **MARK)]
        seen.append(given(hermes, [USER], system=system))
        one_text = f"{BILLING.format(session)}\nYou are an agent."
        seen.append(given(hermes, [USER], system=one_text))
    assert seen == [[{"role": "system", "content": "You are an agent."}, USER]] * 4
    usage = hermes.create(system=[text(BILLING.format("abc")), text("You are an agent.")]).usage
    assert usage.input_tokens == 1


def test_the_billing_line_can_be_kept() -> None:
    with MessagesDaemon.serving(strip_billing_header=False) as keeping:
        system = [text(BILLING.format("1c0")), text("You are an agent.")]
        assert given(keeping, [USER], system=system)[0]["content"].startswith("x-anthropic-billing")


LATE: list[Any] = [
    {"role": "system", "content": "First."},
    USER,
    {"role": "system", "content": [text("Agents:"), text("none")]},
    assistant(text("Yes.")),
    {"role": "system", "content": "Be quick."},
    {"role": "user", "content": "So?"},
]


def test_system_messages_in_mid_list_stay_where_they_are(hermes: MessagesDaemon) -> None:
    assert given(hermes, LATE, system="Head.") == [
        {"role": "system", "content": "Head.\nFirst."},
        USER,
        {"role": "system", "content": "Agents:\nnone"},
        {"role": "assistant", "content": "Yes."},
        {"role": "system", "content": "Be quick."},
        {"role": "user", "content": "So?"},
    ]


class Refusing(RecordingTokenizer):
    """Its template takes system messages at the head alone, and roles that take turns."""

    def apply_chat_template(
        self, messages: Any, replays: Any = NO_REPLAYS, /, **arguments: Any
    ) -> Any:
        roles = [message["role"] for message in messages]
        if "system" in roles[1:] or any(one == two for one, two in pairwise(roles)):
            raise ValueError("the chat template refuses the messages: system in mid-list")
        return super().apply_chat_template(messages, replays, **arguments)


class Dropping(RecordingTokenizer):
    """Its template leaves out system messages that are not at the head."""

    def apply_chat_template(
        self, messages: Any, replays: Any = NO_REPLAYS, /, **arguments: Any
    ) -> Any:
        kept = [m for index, m in enumerate(messages) if m["role"] != "system" or index == 0]
        super().apply_chat_template(messages, replays, **arguments)
        return ByteTokenizer.apply_chat_template(self, kept)


@pytest.mark.parametrize("tokenizer", [Refusing, Dropping])
def test_where_a_template_has_no_place_for_them_the_user_says_them(
    tokenizer: type[RecordingTokenizer],
) -> None:
    with MessagesDaemon.serving(tokenizer()) as strict:
        told = given(strict, LATE)
    reminders = ["<system-reminder>\nAgents:\nnone\n</system-reminder>"]
    reminders.append("<system-reminder>\nBe quick.\n</system-reminder>")
    assert told == [
        {"role": "system", "content": "First."},
        {"role": "user", "content": f"{USER['content']}\n{reminders[0]}"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": f"{reminders[1]}\nSo?"},
    ]


class Answering(RecordingTokenizer):
    """Its template takes nothing but an answer behind the result of a tool, as Mistral's."""

    def apply_chat_template(
        self, messages: Any, replays: Any = NO_REPLAYS, /, **arguments: Any
    ) -> Any:
        pairs = pairwise(message["role"] for message in messages)
        if any(pair == ("tool", "user") for pair in pairs):
            raise ValueError("the chat template refuses the messages: roles must alternate")
        return super().apply_chat_template(messages, replays, **arguments)


def test_where_a_result_wants_an_answer_the_user_speaks_with_it() -> None:
    messages = [USER, assistant(call("a", {})), user(result("a", content="Rain."), text("Go on."))]
    with MessagesDaemon.serving(Answering()) as strict:
        *_, last = given(strict, messages, tools=TOOLS)
    assert (last["role"], last["content"]) == ("tool", "Rain.\nGo on.")


def test_an_answer_that_was_begun_is_continued(hermes: MessagesDaemon) -> None:
    told = given(hermes, [USER, assistant(text("It is ("))])
    assert told[-1] == {"role": "assistant", "content": "It is ("}
    assert hermes.given[1] == {"continue_final_message": True, "add_generation_prompt": False}


def test_tokens_are_counted_of_the_very_prompt(hermes: MessagesDaemon) -> None:
    messages = [user(text("Hi")), assistant(call("a", CALL[1])), user(result("a", content="x"))]
    fields: dict[str, Any] = {"model": "bytes", "messages": messages, "system": "Be brief."}
    count = hermes.anthropic.messages.count_tokens(**fields, tools=TOOLS)
    hermes.create(**fields, tools=TOOLS)
    assert count.input_tokens == len(hermes.asked.prompt)


def test_models_are_listed_for_anthropics_client_too(hermes: MessagesDaemon) -> None:
    (listed,) = hermes.anthropic.models.list()
    assert (listed.id, listed.type, listed.display_name) == ("bytes", "model", "bytes")
    assert listed.max_input_tokens == 512
    assert hermes.anthropic.models.retrieve("bytes") == listed


def test_salted_prompts_are_apart(hermes: MessagesDaemon) -> None:
    hermes.engine.script = Script()
    hermes.create(extra_body={"cache_salt": "mine"})
    assert hermes.asked.cache_salt == "mine"


@pytest.mark.parametrize("place", ["system", "messages", "tools"])
@pytest.mark.parametrize(("ttl", "status"), [("5m", 200), ("1h", 200), ("9y", 400)])
def test_a_mark_has_one_of_the_lifetimes_that_there_are(
    hermes: MessagesDaemon, place: str, ttl: str, status: int
) -> None:
    marked = {"cache_control": {"type": "ephemeral", "ttl": ttl, "scope": "global"}}
    text = {"type": "text", "text": "Hi"}
    body: dict[str, Any] = {
        "system": [text | (marked if place == "system" else {})],
        "messages": [{"role": "user", "content": [text | (marked if place == "messages" else {})]}],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    }
    body["tools"][0] |= marked if place == "tools" else {}
    answer = hermes.http.post("/v1/messages", json={"model": "", "max_tokens": 9, **body})
    assert answer.status_code == status
    if status == 400:
        message = answer.json()["error"]["message"]
        assert message.startswith(place)
        assert "cache_control.ttl" in message
