"""What Anthropic's client is told, whole and event by event."""

import json
from collections.abc import AsyncGenerator, Set
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from engine.values.output import FinishReason, OutputEvent
from engine.values.request import Request
from tests.contract.fake_engine import FakeEngine
from tests.contract.messages.scripted import TOOLS, MessagesDaemon
from tests.contract.scripted import CALL, HERMES_CALL

EVERYTHING = f"<think>\nHm.\n</think>\n\nLet me see.\n{HERMES_CALL}\nThere."


def blocks(message: Any) -> list[dict[str, Any]]:
    """Without the ids of calls, which are never the same."""
    dumped = message.model_dump(exclude_none=True, exclude={"content": {"__all__": {"id"}}})
    content: list[dict[str, Any]] = dumped["content"]
    return content


def test_an_answer_is_blocks_in_their_order(hermes: MessagesDaemon) -> None:
    hermes.say(EVERYTHING)
    message = hermes.create(tools=TOOLS)
    thinking, *others = blocks(message)
    assert thinking.pop("signature")
    assert thinking == {"type": "thinking", "thinking": "Hm."}
    assert others == [
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "name": "get_weather", "input": CALL[1]},
        {"type": "text", "text": "\nThere."},
    ]
    assert (message.type, message.role, message.model) == ("message", "assistant", "bytes")
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)


def test_events_come_in_anthropics_order(hermes: MessagesDaemon) -> None:
    hermes.say(f"<think>\nHm.\n</think>\n\n{HERMES_CALL}")
    events = list(hermes.create(tools=TOOLS, stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    deltas = [e.delta.type if e.type == "content_block_delta" else e.type for e in events[1:-2]]
    assert [kind for i, kind in enumerate(deltas) if i == 0 or kind != deltas[i - 1]] == [
        *("content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "content_block_stop"),
    ]
    starts = [event for event in events if event.type == "content_block_start"]
    assert [event.index for event in starts] == [0, 1]
    assert (starts[0].content_block.thinking, starts[1].content_block.input) == ("", {})
    slices = [e.delta.partial_json for e in events if e.type == "content_block_delta" and e.index]
    assert json.loads("".join(slices)) == CALL[1]
    assert len(slices) > 5, "the input came in one piece"


def test_what_is_computed_of_a_marked_prompt_is_written_to_the_cache(
    hermes: MessagesDaemon,
) -> None:
    text = {"type": "text", "text": "Mark this.", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [text]}]
    tokens = hermes.anthropic.messages.count_tokens(model="bytes", messages=messages).input_tokens
    with hermes.stream(messages=messages) as stream:
        start = next(event for event in stream if event.type == "message_start")
        final = stream.get_final_message()
    for usage in (start.message.usage, final.usage):
        assert usage.input_tokens == 0
        assert usage.cache_creation_input_tokens + usage.cache_read_input_tokens == tokens
        assert usage.cache_creation_input_tokens > 0
    assert (start.message.usage.output_tokens, final.usage.output_tokens) == (0, 14)


def test_reasoning_is_counted(hermes: MessagesDaemon) -> None:
    hermes.say("<think>\nHm, hm, hm.\n</think>\n\nYes.")
    details = hermes.create().usage.output_tokens_details
    assert 11 <= details.thinking_tokens <= 30


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_may_end_by_the_context(hermes: MessagesDaemon, stream: bool) -> None:
    def reason(**fields: Any) -> Any:
        if not stream:
            return hermes.create(**fields).stop_reason
        with hermes.stream(**fields) as streamed:
            return streamed.get_final_message().stop_reason

    hermes.say("x" * 600)
    assert reason(max_tokens=32_000) == "model_context_window_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_without_an_answer_the_prompt_is_cached(hermes: MessagesDaemon, stream: bool) -> None:
    hermes.say("Never said.")
    choice = {"type": "any"}
    asked: dict[str, Any] = {"max_tokens": 0, "tools": TOOLS, "tool_choice": choice}
    if stream:
        with hermes.stream(**asked) as streamed:
            message = streamed.get_final_message()
    else:
        message = hermes.create(**asked)
    assert (message.content, message.stop_reason) == ([], "max_tokens")
    assert message.usage.output_tokens == 0
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 0
    request = hermes.asked
    assert (request.max_tokens, request.constraint) == (0, None)


def test_half_a_character_in_a_calls_input_is_replaced(hermes: MessagesDaemon) -> None:
    said = r'{"name": "get_weather", "arguments": {"city": "a\ud83d b\\ \ud83d\ude00"}}'
    hermes.say(f"<tool_call>\n{said}\n</tool_call>")
    message = hermes.create(tools=TOOLS)
    assert message.content[0].input == {"city": "a\ufffd b\\ \U0001f600"}


class Stopping(FakeEngine):
    """Its answers end at a stop string."""

    async def _events(self, request: Request, live: Set[int]) -> AsyncGenerator[OutputEvent, None]:
        async with aclosing(super()._events(request, live)) as events:
            async for event in events:
                stop = event.finish_reason is FinishReason.STOP
                yield replace(event, stopped_by=request.stop[0]) if stop else event


def test_a_stop_sequence_is_named() -> None:
    with MessagesDaemon.serving(engine=Stopping) as stopping:
        message = stopping.create(stop_sequences=["END", "FIN"])
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
        with stopping.stream(stop_sequences=["END", "FIN"]) as stream:
            streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", "END")
