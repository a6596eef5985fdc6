"""`stream`: what is sent when, to the openai client and to those that read the lines."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import httpx

from tests.contract.fake_engine import Gate, Script
from tests.contract.responses.conftest import Created
from tests.contract.scripted import Daemon
from tests.contract.wire import posted
from tests.polling import WAIT_SECONDS

HERMES_CALL = '<tool_call>\n{"name": "ping", "arguments": {"n": 12}}\n</tool_call>'
PING_TOOL = {"type": "function", "name": "ping", "strict": None, "parameters": None}


def lines(hermes: Daemon, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Names and data of the events, as they stand on the wire."""
    answer = httpx.post(f"{hermes.url}/v1/responses", json={"input": "Hi", "stream": True} | body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def types(events: Sequence[Any]) -> list[str]:
    """Of events in their order, deltas of a kind in a row once."""
    names = [event.type for event in events]
    return [
        name for before, name in pairwise(["", *names]) if before != name or "delta" not in name
    ]


def test_text(create: Created) -> None:
    events = list(create(stream=True))
    assert types(events) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == "Fine."
    final = events[-1].response
    assert final.output_text == "Fine."
    assert final.usage.output_tokens == len("Fine.")
    assert {events[0].response.id, events[1].response.id} == {final.id}
    assert events[0].response.status == events[1].response.status == "in_progress"


def test_all_kinds_of_items(hermes: Daemon, create: Created) -> None:
    hermes.say("<think>\nWell.\n</think>\n\nI ping." + HERMES_CALL)
    events = list(create(stream=True, tools=[PING_TOOL]))
    assert types(events)[2:-1] == [
        *("response.output_item.added", "response.content_part.added"),
        *("response.reasoning_text.delta", "response.reasoning_text.done"),
        *("response.content_part.done", "response.output_item.done"),
        *("response.output_item.added", "response.content_part.added"),
        *("response.output_text.delta", "response.output_text.done"),
        *("response.content_part.done", "response.output_item.done"),
        "response.output_item.added",
        *("response.function_call_arguments.delta", "response.function_call_arguments.done"),
        "response.output_item.done",
    ]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output
    assert [item.type for item in done] == ["reasoning", "message", "function_call"]
    assert [event.output_index for event in events[2:-1]] == sorted(
        event.output_index for event in events[2:-1]
    )
    for event in events[2:-1]:
        item_id = event.item.id if "output_item" in event.type else event.item_id
        assert item_id == done[event.output_index].id


def test_a_summary_is_streamed_in_place_of_the_text(hermes: Daemon, create: Created) -> None:
    hermes.say("<think>\nWell.\n</think>\n\nYes.")
    events = list(create(stream=True, reasoning={"summary": "auto"}))
    assert types(events)[2:8] == [
        "response.output_item.added",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        "response.output_item.done",
    ]
    assert events[-1].response.output[0].summary[0].text == "Well."


def test_the_same_as_in_one_piece(hermes: Daemon, create: Created) -> None:
    """But for ids and times."""
    hermes.say("<think>\nWell.\n</think>\n\nI ping." + HERMES_CALL)
    asked = {"tools": [PING_TOOL], "include": ["message.output_text.logprobs"]}
    whole = create(**asked).model_dump()
    *_, last = create(stream=True, **asked)
    streamed = last.response.model_dump()
    for response in (whole, streamed):
        for name in ("id", "created_at", "completed_at", "usage"):
            del response[name]
        for item in response["output"]:
            item.pop("id")
            item.pop("call_id", None)
    assert streamed == whole


def test_logprobs_stand_with_their_text_in_every_event_that_repeats_it(
    hermes: Daemon, create: Created
) -> None:
    """Also where the text is what such an event has before its logprobs are spliced in."""
    said = 'It says "logprobs":[] there.'
    hermes.say(said)
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    events = list(create(stream=True, **asked))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    (text,) = (event for event in events if event.type == "response.output_text.done")
    (part,) = (event.part for event in events if event.type == "response.content_part.done")
    (item,) = (event.item for event in events if event.type == "response.output_item.done")
    whole = events[-1].response.output[0]
    entries = [entry.model_dump() for delta in deltas for entry in delta.logprobs]
    assert "".join(entry["token"] for entry in entries) == said
    assert {len(entry["top_logprobs"]) for entry in entries} == {3}
    for told in (text, part, item.content[0], whole.content[0]):
        assert told.text == said
        assert [entry.model_dump() for entry in told.logprobs] == entries
    kept = hermes.openai.responses.retrieve(events[-1].response.id)
    assert kept.output[0].model_dump() == whole.model_dump()


def test_the_helper_of_the_client(hermes: Daemon) -> None:
    hermes.say('{"x": 3}')
    with hermes.openai.responses.stream(model="bytes", input="Hi") as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == '{"x": 3}'


def test_every_event_has_its_name_on_the_wire_and_nothing_follows(
    hermes: Daemon, create: Created
) -> None:
    events = lines(hermes, {})
    assert all(name == data["type"] for name, data in events)
    assert events[-1][0] == "response.completed"


def test_an_answer_that_is_cut_off_ends_incomplete(hermes: Daemon, create: Created) -> None:
    hermes.say("A long answer.")
    *_, done, last = create(stream=True, max_output_tokens=6)
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
    assert done.item.status == "incomplete"


def test_a_failed_response_is_stored(hermes: Daemon, create: Created) -> None:
    hermes.engine.script = Script(fails_after_tokens=3)
    *_, last = create(stream=True)
    assert last.response.error.code == "server_error"
    assert hermes.openai.responses.retrieve(last.response.id).status == "failed"


def test_who_leaves_has_nothing_stored(hermes: Daemon) -> None:
    gate = Gate()
    hermes.engine.script = Script(gate=gate, gate_after_tokens=3)
    with posted(hermes.url, "/v1/responses", {"input": "Hi", "stream": True}):
        request_id = hermes.engine.at_gate.get(timeout=WAIT_SECONDS)
    assert hermes.engine.aborted.get(timeout=WAIT_SECONDS) == request_id
    gate.open()
    assert httpx.get(f"{hermes.url}/v1/responses/resp_{request_id}").status_code == 404
