"""Compaction in `/v1/responses` by OpenAI's client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from server.generation.compaction import SUMMARIZE, SUMMARY_HEAD
from server.generation.seals import KEY_FILE, PREFIX
from tests.contract.compacting import CompactingDaemon, compacting, texts, warmed
from tests.contract.responses.conftest import WEATHER_TOOL

LONG = "Radix trees share what prompts have in common. " * 400
SUMMARY = "We spoke of radix trees."
HEAD = ("user", SUMMARY_HEAD + SUMMARY)
QUOTED = "\n\nThe last message, which is yet to be answered:\n\n"
TRIGGER = {"type": "compaction_trigger"}
AUTOMATIC = [{"type": "compaction", "compact_threshold": 1000}]

Json = dict[str, Any]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[CompactingDaemon]:
    """One for each test, because it goes on computing heads after their conversations' answers."""
    with compacting(tmp_path) as made:
        made.say(SUMMARY)
        yield made


def respond(daemon: CompactingDaemon, **fields: Any) -> Any:
    return daemon.openai.responses.create(**{"model": "bytes"} | fields)


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def items(output: Any) -> list[Json]:
    return [item.model_dump(exclude_none=True) for item in output]


def share(usage: Any) -> float:
    return float(usage.input_tokens_details.cached_tokens / usage.input_tokens)


def test_a_conversation_is_compacted_and_goes_on(daemon: CompactingDaemon) -> None:
    given = [user(LONG), {"role": "assistant", "content": "Yes."}]
    made = daemon.openai.responses.compact(model="bytes", input=given, instructions="Be brief.")
    assert made.object == "response.compaction"
    (item,) = made.output
    assert item.type == "compaction"
    asked = daemon.prompts_until_warmed[0]
    assert bytes(asked.prompt).decode().endswith(f"Yes.\n<user>{SUMMARIZE}\n<assistant>")
    assert made.usage.output_tokens == len(SUMMARY)
    said = [*items(made.output), user("So?")]
    respond(daemon, input=said, instructions="Be brief.")
    assert daemon.told == [("system", "Be brief."), HEAD, ("user", "So?")]


def test_the_summary_s_turn_and_the_one_after_it_are_cached(daemon: CompactingDaemon) -> None:
    """With instructions and tools, which the client of `/compact` sends no more."""
    fields: Json = {"tools": [WEATHER_TOOL], "instructions": "Share what can be shared."}
    first = respond(daemon, input=LONG, **fields)
    prompt = daemon.asked.prompt
    made = daemon.openai.responses.compact(model="bytes", previous_response_id=first.id)
    asked, head = daemon.prompts_until_warmed
    assert list(asked.prompt)[: len(prompt)] == list(prompt)
    assert share(made.usage) >= 0.95
    assert f"{SUMMARY}\n<assistant>" in bytes(head.prompt).decode()
    after = respond(daemon, input=[*items(made.output), user("So?")], **fields)
    new = len("<user>So?\n<assistant>")
    details = after.usage.input_tokens_details
    assert after.usage.input_tokens - details.cached_tokens <= new


def test_a_head_is_warmed_with_the_tools_that_the_prompt_had(daemon: CompactingDaemon) -> None:
    """Of a client whose turn for the summary has none, as Codex' has."""
    made = {"type": "function_call", "call_id": "once", "name": "get_weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "once", "output": LONG}
    given = [user("Weather?"), made, output]
    respond(daemon, input=given, tools=[WEATHER_TOOL])
    tools = daemon.given[1]["tools"]
    said = [*given, {"role": "assistant", "content": SUMMARY}]
    daemon.openai.responses.compact(model="bytes", input=said)
    assert warmed(daemon)
    assert daemon.told == [HEAD]
    assert daemon.tools[-2:] == [tools] * 2


def test_a_trigger_makes_the_response_a_summary(daemon: CompactingDaemon) -> None:
    first = respond(daemon, input=LONG)
    made = respond(daemon, input=[TRIGGER], previous_response_id=first.id)
    (item,) = made.output
    assert (made.status, item.type) == ("completed", "compaction")
    assert share(made.usage) >= 0.95
    respond(daemon, input="So?", previous_response_id=made.id)
    assert daemon.told == [HEAD, ("user", "So?")]
    listed = daemon.openai.responses.input_items.list(made.id).data
    assert [one.type for one in listed] == ["message", "message"], "the trigger is over"
    found = daemon.openai.responses.retrieve(made.id)
    assert found.output[0].encrypted_content == item.encrypted_content


def test_a_trigger_in_a_stream(daemon: CompactingDaemon) -> None:
    made = respond(daemon, input=[user(LONG), TRIGGER], stream=True)
    events = list(made)
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.compaction.compacting",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == [*range(6)]
    *_, done, completed = events
    assert completed.response.output == [done.item]
    respond(daemon, input=[*items([done.item]), user("So?")])
    assert daemon.told == [HEAD, ("user", "So?")], "a long message is not repeated"


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_beyond_the_threshold_is_compacted_first(
    daemon: CompactingDaemon, stream: bool
) -> None:
    given = [user(LONG), {"role": "assistant", "content": "Yes."}, user("Which?")]
    made = respond(daemon, input=given, context_management=AUTOMATIC, stream=stream)
    if stream:
        *events, last = made
        added = [event.item for event in events if event.type == "response.output_item.added"]
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.type for item in added] == ["compaction", "message"]
        made = last.response
        assert done == made.output
    compaction, message = made.output
    assert (compaction.type, message.type) == ("compaction", "message")
    summarized, asked = daemon.prompts
    assert len(asked.prompt) < 1000 < len(summarized.prompt)
    told = [(HEAD[0], f"{HEAD[1]}{QUOTED}Which?")]
    assert daemon.told == told
    assert made.usage.input_tokens == len(asked.prompt)
    assert made.usage.model_extra["compaction"]["input_tokens"] == len(summarized.prompt)
    say = [*told, ("assistant", SUMMARY), ("user", "So?")]
    respond(daemon, input=[*given, *items(made.output), user("So?")])
    assert daemon.told == say, "the client may keep what the summary stands for"
    respond(daemon, input="So?", previous_response_id=made.id)
    assert daemon.told == say


def test_a_short_conversation_is_left_as_it_is(daemon: CompactingDaemon) -> None:
    for context in (AUTOMATIC, [{"type": "compaction"}]):
        made = respond(daemon, input="Hi", context_management=context)
        assert [item.type for item in made.output] == ["message"]
        assert daemon.told == [("user", "Hi")]
        assert "compaction" not in made.usage.model_extra


def test_the_default_threshold_leaves_room_for_the_summary(daemon: CompactingDaemon) -> None:
    """Three quarters of the context, whatever more is asked for."""
    for context in ([{"type": "compaction"}], [{"type": "compaction", "compact_threshold": 10**6}]):
        made = respond(daemon, input="x" * 24_600, context_management=context)
        assert [item.type for item in made.output] == ["compaction", "message"]


def test_where_the_model_writes_no_summary_nothing_is_compacted(daemon: CompactingDaemon) -> None:
    daemon.say("<think>\nHm.\n</think>\n\n")
    made = respond(daemon, input=LONG, context_management=AUTOMATIC)
    assert "compaction" not in [item.type for item in made.output]
    assert daemon.told == [("user", LONG)]
    with pytest.raises(openai.InternalServerError) as failed:
        daemon.openai.responses.compact(model="bytes", input=LONG)
    assert failed.value.code == "compaction_failed"
    with pytest.raises(openai.InternalServerError):
        respond(daemon, input=[user(LONG), TRIGGER])
    *_, last = respond(daemon, input=[user(LONG), TRIGGER], stream=True)
    assert last.type == "response.failed"


def test_messages_of_users_that_a_client_keeps_stay(daemon: CompactingDaemon) -> None:
    """As OpenAI's own route returns them before the summary."""
    given = [user("One"), {"role": "assistant", "content": "Yes."}, user("Two")]
    made = daemon.openai.responses.compact(model="bytes", input=given)
    respond(daemon, input=[user("One"), user("Two"), *items(made.output), user("So?")])
    summary = (HEAD[0], f"{HEAD[1]}{QUOTED}Two")
    assert daemon.told == [("user", "One"), ("user", "Two"), summary, ("user", "So?")]


def test_a_summary_is_summarized_again(daemon: CompactingDaemon) -> None:
    first = daemon.openai.responses.compact(model="bytes", input=[user(LONG)])
    said = [*items(first.output), user("More.")]
    daemon.say("Twice.")
    second = daemon.openai.responses.compact(model="bytes", input=said)
    respond(daemon, input=[*said, *items(second.output), user("So?")])
    head = f"{SUMMARY_HEAD}Twice.{QUOTED}More."
    assert daemon.told == [("user", head), ("user", "So?")]


def test_nobody_forges_a_summary(daemon: CompactingDaemon) -> None:
    made = daemon.openai.responses.compact(model="bytes", input=LONG)
    (item,) = items(made.output)
    sealed = item["encrypted_content"]
    for forged in (sealed[:-4] + "AAAA", PREFIX, PREFIX + "?", PREFIX + "AAAA", sealed + "Ä"):
        with pytest.raises(openai.BadRequestError) as refused:
            respond(daemon, input=[user("Hi"), {**item, "encrypted_content": forged}])
        assert refused.value.code == "compaction_signature_invalid"
        assert refused.value.param == "input[1].encrypted_content"


def test_nothing_is_warmed_of_what_is_not_to_be_kept(daemon: CompactingDaemon) -> None:
    options = {"extra_body": {"prompt_cache_options": {"keep": False}}}
    daemon.openai.responses.compact(model="bytes", input=LONG, **options)
    respond(daemon, input=[user(LONG), TRIGGER], **options)
    respond(daemon, input=LONG, context_management=AUTOMATIC, **options)
    respond(daemon, input="Hi")
    asked = daemon.prompts
    assert [one.shared_tokens for one in asked] == [0, 0, 0, 0, None]
    assert not any(one.is_background for one in asked)


def test_a_summary_of_another_server_is_skipped(daemon: CompactingDaemon) -> None:
    sealed = {"type": "compaction", "encrypted_content": "gAAA"}
    respond(daemon, input=[user("Hi"), sealed, user("So?")])
    assert daemon.told == [("user", "Hi"), ("user", "So?")]


def test_the_model_sees_the_summary_and_the_client_no_more_than_its_own(
    daemon: CompactingDaemon,
) -> None:
    first = daemon.openai.responses.compact(model="bytes", input=[user("Hi")])
    respond(daemon, input=[*items(first.output), user("So?")])
    assert texts(daemon.told).count(SUMMARY) == 1


def test_a_restart_keeps_the_key_and_another_installation_has_another(
    daemon: CompactingDaemon, tmp_path: Path
) -> None:
    made = daemon.openai.responses.compact(model="bytes", input=LONG)
    key = tmp_path / "rootstock" / KEY_FILE
    assert key.stat().st_mode & 0o777 == 0o600
    given = [*items(made.output), user("So?")]
    with compacting(tmp_path) as restarted:
        respond(restarted, input=given)
        assert restarted.told[0] == HEAD
    elsewhere = tmp_path / "elsewhere"
    with compacting(elsewhere) as other, pytest.raises(openai.BadRequestError) as refused:
        respond(other, input=given)
    assert refused.value.code == "compaction_signature_invalid"
    assert (elsewhere / "rootstock" / KEY_FILE).read_bytes() != key.read_bytes()


def test_without_a_folder_for_the_key_summaries_work_until_the_end(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    with compacting(blocked) as daemon:
        daemon.say(SUMMARY)
        made = daemon.openai.responses.compact(model="bytes", input=LONG)
        respond(daemon, input=[*items(made.output), user("So?")])
        assert daemon.told == [HEAD, ("user", "So?")]
    with compacting(blocked) as daemon, pytest.raises(openai.BadRequestError) as refused:
        respond(daemon, input=[*items(made.output), user("So?")])
    assert "before it started" in refused.value.message
