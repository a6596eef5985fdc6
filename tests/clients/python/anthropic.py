"""anthropic, strict: Messages, whole and streamed, and the count of tokens."""

from typing import Any

import anthropic
from anthropic import Anthropic
from anthropic.types.beta import BetaContentBlockParam

from tests.clients import scenario
from tests.clients.checks import Daemon, Scripted, main, raised, stopped, with_cached
from tests.sdk_unions import instances

TOOL = {
    "name": scenario.WEATHER_TOOL["name"],
    "description": scenario.WEATHER_TOOL["description"],
    "input_schema": scenario.WEATHER_TOOL["parameters"],
}


def conversation(daemon: Daemon) -> str:
    messages: list[Any] = [_user(scenario.GREETING)]
    first = _ask(daemon, messages)
    last = _ask(daemon, [*messages, _assistant(first), _user(scenario.FAREWELL)])
    cached = last.usage.cache_read_input_tokens
    assert first.stop_reason == "end_turn", first
    return with_cached(_text(first), cached)


def stream(daemon: Daemon) -> str:
    with _client(daemon).messages.stream(**_body(daemon, [_user(scenario.GREETING)])) as events:
        slices = list(events.text_stream)
        answer = events.get_final_message()
    assert "".join(slices) == _text(answer) == _text(_ask(daemon, [_user(scenario.GREETING)])), (
        answer
    )
    assert answer.usage.output_tokens > 0
    return f"{len(slices)} slices: {_text(answer)}"


def tool_loop(daemon: Daemon) -> str:
    return _tool_loop(daemon, _ask)


def streamed_tool_loop(daemon: Daemon) -> str:
    return _tool_loop(daemon, _stream)


def count_of_tokens(daemon: Daemon) -> str:
    """What a question costs, before it is asked."""
    question = {"messages": [_user(scenario.QUESTION)], "system": scenario.SYSTEM, "tools": [TOOL]}
    counted = _client(daemon).messages.count_tokens(model=daemon.model, **question).input_tokens
    usage = _ask(daemon, [_user(scenario.QUESTION)], tools=[TOOL]).usage
    read = usage.cache_read_input_tokens + (usage.cache_creation_input_tokens or 0)
    assert counted == usage.input_tokens + read, (counted, usage)
    return f"{counted} tokens"


def histories(daemon: Daemon) -> str:
    """Every kind of block that the library knows but pictures, one by one, in a history."""
    kinds = {block["type"]: block for block in instances(BetaContentBlockParam)}
    plain = {"type": "text", "media_type": "text/plain", "data": scenario.GREETING}
    kinds["document"]["source"] = plain
    del kinds["image"]
    for kind, block in kinds.items():
        role = "user" if kind in {"document", "search_result", "tool_result"} else "assistant"
        said = {"role": role, "content": [block]}
        _ask(daemon, [_user(scenario.GREETING), said, _user(scenario.FAREWELL)])
    return f"{len(kinds)} kinds of blocks"


def errors(daemon: Daemon) -> str:
    unknown = Daemon(daemon.root, scenario.UNKNOWN)
    missing = raised(anthropic.NotFoundError, lambda: _ask(unknown, [_user(scenario.GREETING)]))
    assert scenario.UNKNOWN in str(missing), missing
    long = [_user("word " * 100_000)]
    refused: Any = raised(anthropic.BadRequestError, lambda: _ask(daemon, long))
    assert refused.body["error"]["type"] == "invalid_request_error", refused.body
    return str(refused)


@Scripted
def cancellation(daemon: Daemon) -> str:
    events = _ask(daemon, [_user(scenario.ENDLESS)], stream=True)
    next(events)
    return stopped(daemon, events.close)


@Scripted
def thinking(daemon: Daemon) -> str:
    """Comes back with a signature, and is sent again with it in the loop above."""
    block, _ = _ask(daemon, [_user(scenario.GREETING)]).content
    assert (block.type, block.thinking) == ("thinking", scenario.REASONING), block
    assert block.signature
    return scenario.REASONING


def _tool_loop(daemon: Daemon, ask: Any) -> str:
    station = scenario.WeatherStation()
    messages: list[Any] = [_user(scenario.QUESTION)]
    while (answer := ask(daemon, messages, tools=[TOOL])).stop_reason == "tool_use":
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": station.get_weather(**block.input),
            }
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages += [_assistant(answer), {"role": "user", "content": results}]
    assert answer.usage.cache_read_input_tokens > 0
    return station.check(_text(answer))


@Scripted
def image(daemon: Daemon) -> str:
    """The next turn finds it cached. A tool may show one, too."""
    source = {"type": "base64", "media_type": "image/png", "data": scenario.picture_base64()}
    shown = {"type": "image", "source": source}
    text = {"type": "text", "text": scenario.PICTURE_QUESTION}
    messages: list[Any] = [{"role": "user", "content": [shown, text]}]
    first = _ask(daemon, messages)
    scenario.saw_the_picture(_text(first))
    last = _ask(daemon, [*messages, _assistant(first), _user(scenario.FAREWELL)])
    use = {"type": "tool_use", "id": "toolu_1", "name": TOOL["name"], "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [shown]}
    history = [
        _user(scenario.PICTURE_QUESTION),
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    answer = scenario.saw_the_picture(_text(_ask(daemon, history)))
    return with_cached(answer, last.usage.cache_read_input_tokens)


def _user(text: str) -> dict[str, Any]:
    block = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    return {"role": "user", "content": [block]}


def _assistant(answer: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": answer.content}


def _text(answer: Any) -> str:
    return "".join(block.text for block in answer.content if block.type == "text")


def _ask(daemon: Daemon, messages: list[Any], **fields: Any) -> Any:
    return _client(daemon).messages.create(**_body(daemon, messages), **fields)


def _stream(daemon: Daemon, messages: list[Any], **fields: Any) -> Any:
    with _client(daemon).messages.stream(**_body(daemon, messages), **fields) as events:
        return events.get_final_message()


def _body(daemon: Daemon, messages: list[Any]) -> dict[str, Any]:
    return {
        "model": daemon.model,
        "system": scenario.SYSTEM,
        "messages": messages,
        "max_tokens": scenario.MAX_TOKENS,
        "extra_body": {"temperature": 0},  # the SDK has no such argument any more
    }


def _client(daemon: Daemon) -> Any:
    return Anthropic(
        base_url=daemon.root,
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    )


if __name__ == "__main__":
    main(globals())
