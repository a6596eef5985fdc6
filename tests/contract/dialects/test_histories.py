"""No history is refused: every kind that the vendors' libraries know may stand in one, and kinds of
tomorrow too.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest
from anthropic.types.beta import BetaContentBlockParam
from openai.types.responses import ResponseInputItemParam

from tests.contract.scripted import TOOLS, Daemon
from tests.sdk_unions import instances

HI = {"role": "user", "content": "Hi"}
SO = {"role": "user", "content": "So?"}

Json = Mapping[str, Any]


def kinds(union: object, *but: str) -> list[Any]:
    made = [each for each in instances(union) if each.get("type") not in but]
    assert len(made) > 20
    return [pytest.param(each, id=f"{at}-{each.get('type')}") for at, each in enumerate(made)]


def respond(daemon: Daemon, *items: Json, **fields: Any) -> Any:
    daemon.say("Fine.")
    return daemon.http.post("/v1/responses", json={"input": [HI, *items, SO], **fields})


def messages(daemon: Daemon, role: str, *blocks: Json, **fields: Any) -> Any:
    daemon.say("Fine.")
    said = [HI, {"role": role, "content": list(blocks)}, SO]
    body = {"messages": said, "max_tokens": 9, **fields}
    return daemon.http.post("/v1/messages", json=body)


def prompt(daemon: Daemon) -> str:
    return json.dumps(daemon.given[0])


@pytest.mark.parametrize("item", kinds(ResponseInputItemParam, "item_reference"))
def test_every_item_may_stand_in_a_history(hermes: Daemon, item: Json) -> None:
    answer = respond(hermes, item)
    assert answer.status_code == 200, answer.text
    before = answer.json()["id"]
    again = hermes.http.post("/v1/responses", json={"input": [SO], "previous_response_id": before})
    assert again.status_code == 200, again.text


def test_a_configuration_update_holds_until_the_next(hermes: Daemon) -> None:
    """For the response, and for those that continue it."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    format = {"type": "json_schema", "name": "x", "schema": schema}

    def updated(**fields: Any) -> Json:
        return {"type": "configuration_update", **fields}

    def given() -> tuple[str | None, bool]:
        constraint = hermes.engine.submitted.get_nowait().constraint
        effort = hermes.given[1].get("reasoning_effort")
        return effort, constraint is not None and '"integer"' in constraint.grammar.text

    first = respond(
        hermes,
        updated(reasoning={"effort": "high"}),
        {"role": "developer", "content": "Be brief."},
        updated(reasoning={"effort": "low"}, text={"format": format}),
        reasoning={"effort": "high"},
    ).json()
    assert given() == ("low", True)
    assert first["reasoning"]["effort"] == "low"
    assert first["text"]["format"]["schema"] == schema
    before = {"previous_response_id": first["id"]}
    assert respond(hermes, **before).status_code == 200
    assert given() == ("low", True)
    assert respond(hermes, **before, reasoning_effort="high").status_code == 200
    assert given() == ("high", True), "what contradicts the request is passed over"
    plain = updated(text={"format": {"type": "text"}})
    assert respond(hermes, plain, **before).json()["text"]["format"] == {"type": "text"}
    assert given() == ("low", False)
    counted = {"input": [HI, updated(reasoning={"effort": "nonsense"})]}
    assert hermes.http.post("/v1/responses/input_tokens", json=counted).status_code == 400


OF_USERS = {"tool_result", "document", "search_result"}


@pytest.mark.parametrize("block", kinds(BetaContentBlockParam, "image"))
def test_every_block_may_stand_in_a_history(hermes: Daemon, block: Json) -> None:
    if block["type"] == "document":
        block = {**block, "source": {"type": "text", "media_type": "text/plain", "data": "one"}}
    role = "user" if block["type"] in OF_USERS else "assistant"
    answer = messages(hermes, role, block)
    assert answer.status_code == 200, answer.text


SEARCH = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
SECRET = "A" * 400


def test_what_an_item_says_is_told_and_its_data_is_not(hermes: Daemon) -> None:
    call = {"type": "mcp_call", "id": "mcp_1", "server_label": "docs", "name": "find",
            "arguments": '{"of": "rain"}', "output": "It is wet."}  # fmt: skip
    painted = {"type": "image_generation_call", "id": "ig_1", "result": SECRET}
    sealed = {"type": "compaction", "id": "c", "encrypted_content": "gAAA"}
    query = {**SEARCH, "action": {"type": "search", "query": "radix trees"}}
    respond(hermes, query, call, painted, sealed, {"type": "of_tomorrow", "text": "Sun."})
    told = prompt(hermes)
    for text in ("radix trees", "It is wet.", "[of_tomorrow: Sun.]"):
        assert text in told
    for hidden in ("ws_1", "mcp_1", SECRET, "gAAA", "completed"):
        assert hidden not in told


def test_foreign_parts_are_counted_in_one_line_of_the_log(
    hermes: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    forged = {"type": "x\nINFO forged" + "y" * 99}
    with caplog.at_level(logging.INFO, "rootstock.history"):
        respond(hermes, SEARCH, SEARCH, forged, *({"type": f"kind_{n}"} for n in range(20)))
        messages(hermes, "assistant", {"type": "server_tool_use"}, {"type": "fallback"})
    first, second = (line for line in caplog.messages if "of other servers" in line)
    assert "'web_search_call': 2" in first
    assert "\n" not in first
    assert len(first) < 1000
    assert "'server_tool_use': 1" in second


def test_the_result_of_a_server_s_tool_is_told(hermes: Daemon) -> None:
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [
        {"type": "web_search_result", "title": "Rain", "url": "https://example.com/rain",
         "encrypted_content": SECRET}]}  # fmt: skip
    messages(hermes, "assistant", found, {"type": "text", "text": "It rains."})
    assert "https://example.com/rain" in prompt(hermes)
    assert SECRET not in prompt(hermes)
    assert hermes.given[0][1]["content"].endswith("]\n\nIt rains.")


DEFERRED = {"name": "look", "input_schema": {"type": "object"}, "defer_loading": True}
FOUND = {"type": "tool_search_tool_result", "tool_use_id": "s", "content": {
    "type": "tool_search_tool_search_result",
    "tool_references": [{"type": "tool_reference", "tool_name": "look"}]}}  # fmt: skip


@pytest.mark.parametrize(
    ("role", "block"),
    [
        ("assistant", FOUND),
        ("system", {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "look"}}),
        ("system", {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {
            "name": "look", "input_schema": {"type": "object"}}}}),
    ],
)  # fmt: skip
def test_a_tool_that_is_added_or_found_is_known_from_there_on(
    hermes: Daemon, role: str, block: Json
) -> None:
    other = {"name": "other", "input_schema": {"type": "object"}}
    assert messages(hermes, role, block, tools=[other, DEFERRED]).status_code == 200
    assert '\\"name\\": \\"look\\"' in prompt(hermes)
    assert "look" not in json.dumps(hermes.given[1]["tools"])


@pytest.mark.parametrize("type", ["bash_20250124", "text_editor_20250728", "memory_20250818"])
def test_a_tool_of_anthropic_s_that_the_client_runs_is_a_function(
    hermes: Daemon, type: str
) -> None:
    hermes.say('<tool_call>\n{"name": "mine", "arguments": {"command": "view"}}\n</tool_call>')
    body = {"messages": [HI], "max_tokens": 99, "tools": [{"type": type, "name": "mine"}]}
    answer = hermes.http.post("/v1/messages", json=body).json()
    (made,) = answer["content"]
    assert (made["type"], made["name"], made["input"]) == ("tool_use", "mine", {"command": "view"})
    (declared,) = hermes.given[1]["tools"]
    assert "command" in declared["function"]["parameters"]["properties"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "web_search"}])
def test_a_choice_of_a_dropped_tool_is_auto_for_messages(hermes: Daemon, choice: Any) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    answer = messages(hermes, "assistant", {"type": "text", "text": "Yes."}, tools=tools,
                      tool_choice=choice)  # fmt: skip
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "web_search"},
        {"type": "mcp", "server_label": "docs"},
        {"type": "programmatic_tool_calling"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "file_search"}]},
    ],
)
def test_a_choice_of_a_dropped_tool_is_auto_for_responses(hermes: Daemon, choice: Any) -> None:
    answer = respond(hermes, tools=[{"type": "web_search"}], tool_choice=choice)
    assert answer.status_code == 200, answer.text
    assert hermes.engine.submitted.get_nowait().constraint is None


def chat(daemon: Daemon, *said: Json, **fields: Any) -> Any:
    daemon.say("Fine.")
    body = {"messages": [HI, *said, SO], **fields}
    return daemon.http.post("/v1/chat/completions", json=body)


HOSTED = {"type": "web_search", "search_context_size": "low"}


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "web_search"},
        {"type": "function", "function": {"name": "web_search"}},
    ],
)
def test_a_choice_of_a_dropped_tool_is_auto_for_chats(hermes: Daemon, choice: Any) -> None:
    answer = chat(hermes, tools=[HOSTED], tool_choice=choice)
    assert answer.status_code == 200, answer.text
    assert hermes.engine.submitted.get_nowait().constraint is None


def test_a_choice_of_tools_that_chats_have_is_kept(hermes: Daemon) -> None:
    def refused(choice: Any) -> str:
        answer = chat(hermes, tools=[HOSTED, *TOOLS], tool_choice=choice)
        error: dict[str, str] = answer.json()["error"]
        return error["message"]

    def allowed(*tools: Json) -> Json:
        of = {"mode": "required", "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": of}

    weather = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", weather, allowed(weather, {"type": "web_search"})):
        assert chat(hermes, tools=[HOSTED, *TOOLS], tool_choice=choice).status_code == 200
        constraint = hermes.engine.submitted.get_nowait().constraint
        assert constraint is not None, choice
        assert "get_weather" in constraint.grammar.text
    assert chat(hermes, tools=[HOSTED, *TOOLS], tool_choice=allowed(HOSTED)).status_code == 200
    assert hermes.engine.submitted.get_nowait().constraint is None
    assert "no function 'mcp'" in refused({"type": "mcp"})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/v1/messages"])
def test_tools_of_other_kinds_are_dropped_and_counted_in_one_line(
    hermes: Daemon, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    forged = [{"type": f"x{n}\nINFO forged{'y' * 40}"} for n in range(20)]
    own: Json = {"name": "mine", "input_schema": {}} if path == "/v1/messages" else TOOLS[0]
    hermes.say("Fine.")
    body = {"messages": [HI], "max_tokens": 9, "tools": [HOSTED, own, HOSTED, *forged]}
    with caplog.at_level(logging.INFO, "rootstock.history"):
        answer = hermes.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert len(hermes.given[1]["tools"]) == 1
    (line,) = (line for line in caplog.messages if "no such tools" in line)
    assert "'web_search': 2" in line
    assert "\n" not in line
    assert len(line) < 1000


def test_calls_of_other_kinds_in_a_chat_are_told_with_what_they_returned(
    hermes: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    search = {"id": "a", "type": "web_search", "web_search": {"query": "radix trees"}}
    call = {"id": "b", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    said: list[Json] = [
        {"role": "assistant", "content": "I look.", "tool_calls": [search, call, search]},
        {"role": "tool", "tool_call_id": "a", "content": "They are trees."},
        {"role": "tool", "tool_call_id": "b", "content": "It rains."},
        {"role": "assistant", "tool_calls": [{**search, "web_search": None}]},
        {"role": "tool", "tool_call_id": "a", "content": ""},
    ]
    with caplog.at_level(logging.INFO, "rootstock.history"):
        answer = chat(hermes, *said, tools=TOOLS, cache_salt="of this test")
    assert answer.status_code == 200, answer.text
    _, looked, told, result, again, _ = hermes.given[0]
    note = '[web_search: {"web_search": {"query": "radix trees"}}]'
    assert looked["content"] == f"I look.\n\n{note}\n\n{note}"
    assert [each["id"] for each in looked["tool_calls"]] == ["b"]
    assert (told["role"], told["content"]) == ("user", "[web_search result: They are trees.]")
    assert (result["role"], result["content"]) == ("tool", "It rains.")
    assert (again["role"], again["content"]) == ("assistant", "")
    (line,) = (line for line in caplog.messages if "of other servers" in line)
    assert "'web_search': 3" in line


PATCH = {"type": "create_file", "path": "a.txt", "diff": "+a"}
CLIENT_CALLS = [
    ("apply_patch", PATCH, "operation", PATCH, {"type": "apply_patch_call_output",
     "status": "failed", "output": "no such folder"}, "failed: no such folder"),
    ("shell", {"commands": ["ls", "pwd"]}, "action", {"commands": ["ls", "pwd"]},
     {"type": "shell_call_output", "output": [{"stdout": "a\n", "stderr": "b",
      "outcome": {"type": "exit", "exit_code": 2}}]}, "a\nb\n(exit code 2)"),
    ("local_shell", {"command": ["ls"]}, "action", {"type": "exec", "command": ["ls"], "env": {}},
     {"type": "local_shell_call_output", "output": "a.txt"}, "a.txt"),
    ("tool_search", {"query": "rain"}, "arguments", {"query": "rain"},
     {"type": "tool_search_output", "execution": "client", "tools": []}, "Nothing was found."),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("tool", "arguments", "field", "value", "output", "text"),
    CLIENT_CALLS,
    ids=[case[0] for case in CLIENT_CALLS],
)
def test_a_call_of_a_tool_with_items_of_its_own_there_and_back(
    hermes: Daemon,
    tool: str,
    arguments: Json,
    field: str,
    value: Json,
    output: Json,
    text: str,
    stream: bool,
) -> None:
    said = json.dumps({"name": tool, "arguments": arguments})
    hermes.say(f"<tool_call>\n{said}\n</tool_call>")
    declared = {"type": tool, **({"execution": "client"} if tool == "tool_search" else {})}
    asked: Any = {"model": "bytes", "tools": [declared], "stream": stream}
    made = hermes.openai.responses.create(input="Hi", **asked)
    events = list(made) if stream else []
    response = events[-1].response if stream else made
    (item,) = response.output
    assert (item.type, item.status) == (f"{tool}_call", "completed")
    given = getattr(item, field)
    told = given if isinstance(given, dict) else given.model_dump(exclude_none=True)
    assert told == value
    if stream:
        (added,) = (each.item for each in events if each.type == "response.output_item.added")
        assert (added.type, added.status) == (f"{tool}_call", "in_progress")
        run = [each.command for each in events if each.type == "response.shell_call_command.done"]
        assert run == (arguments.get("commands") or [])
    hermes.say("Fine.")
    result: Any = {**output, "call_id": item.call_id}
    body = {"input": [result], "previous_response_id": response.id, "tools": [declared]}
    answer = hermes.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    _, called, returned = hermes.given[0]
    assert called["tool_calls"][0]["function"] == {"name": tool, "arguments": arguments}
    assert returned["content"] == text


def test_a_call_that_is_cut_off_is_no_item_that_a_client_runs(hermes: Daemon) -> None:
    hermes.say('<tool_call>\n{"name": "shell", "arguments": {"commands": ["rm -r /tmp/x"]}}')
    body = {"input": "Hi", "tools": [{"type": "shell"}], "max_output_tokens": 60}
    answer = hermes.http.post("/v1/responses", json=body).json()
    (item,) = answer["output"]
    assert (item["type"], item["name"], item["status"]) == ("function_call", "shell", "incomplete")


@pytest.mark.parametrize("tool", ["apply_patch", "shell", "local_shell"])
def test_one_that_is_chosen_by_its_kind_is_called(hermes: Daemon, tool: str) -> None:
    functions = [{**each["function"], "type": "function"} for each in TOOLS]  # type: ignore[dict-item]
    answer = respond(hermes, tools=[{"type": tool}, *functions], tool_choice={"type": tool})
    assert answer.status_code == 200, answer.text
    constraint = hermes.engine.submitted.get_nowait().constraint
    assert constraint is not None
    assert tool in constraint.grammar.text
    assert "get_weather" not in constraint.grammar.text


@pytest.mark.parametrize("searches", ["client", "server"])
def test_tools_are_deferred_where_the_client_searches_for_them(
    hermes: Daemon, searches: str
) -> None:
    late = {"type": "function", "name": "late", "parameters": {}, "defer_loading": True}
    respond(hermes, tools=[{"type": "tool_search", "execution": searches}, late])
    names = [tool["function"]["name"] for tool in hermes.given[1]["tools"]]
    assert names == (["tool_search"] if searches == "client" else ["late"])
