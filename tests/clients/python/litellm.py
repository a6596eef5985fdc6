"""litellm: calls, whole and streamed, through its `openai/` provider."""

import json
from typing import Any

import litellm

from tests.clients import scenario
from tests.clients.checks import Daemon, Scripted, main, raised, stopped, with_cached

TOOL = {"type": "function", "function": scenario.WEATHER_TOOL}
USER = {"role": "user", "content": scenario.QUESTION}


def conversation(daemon: Daemon) -> str:
    messages: list[Any] = [{"role": "user", "content": scenario.GREETING}]
    first = _ask(daemon, messages=messages, tools=None).choices[0].message
    messages += [first, {"role": "user", "content": scenario.FAREWELL}]
    cached = _ask(daemon, messages=messages, tools=None).usage.prompt_tokens_details.cached_tokens
    return with_cached(first.content, cached)


def streamed_call(daemon: Daemon) -> str:
    chunks = list(_ask(daemon, stream=True, stream_options={"include_usage": True}))
    slices = [
        call.function.arguments
        for chunk in chunks
        for choice in chunk.choices
        for call in choice.delta.tool_calls or ()
    ]
    assert json.loads("".join(slices)) == {"city": scenario.CITY, "day": scenario.DAY}, slices
    whole = litellm.stream_chunk_builder(chunks)
    (call,) = whole.choices[0].message.tool_calls
    assert (call.function.name, whole.choices[0].finish_reason) == ("get_weather", "tool_calls")
    assert whole.usage.prompt_tokens > 0
    return f"{len(slices)} slices of {call.function.name}"


def tool_loop(daemon: Daemon) -> str:
    station = scenario.WeatherStation()
    messages: list[Any] = [USER]
    while calls := (answer := _ask(daemon, messages=messages)).choices[0].message.tool_calls:
        messages.append(answer.choices[0].message)
        for call in calls:
            result = station.get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    cached = answer.usage.prompt_tokens_details.cached_tokens
    return with_cached(station.check(answer.choices[0].message.content), cached)


@Scripted
def cancellation(daemon: Daemon) -> str:
    messages = [{"role": "user", "content": scenario.ENDLESS}]
    chunks = _ask(daemon, messages=messages, tools=None, stream=True)
    next(chunks)
    return stopped(daemon, chunks.completion_stream.close)


def named_function(daemon: Daemon) -> str:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = _ask(daemon, tool_choice=choice, parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments).keys() == {"city", "day"}
    return str(call.function.arguments)


@Scripted
def reasoning(daemon: Daemon) -> str:
    """Whole, and streamed before the call."""
    whole = _ask(daemon).choices[0].message.reasoning_content
    deltas = [chunk.choices[0].delta for chunk in _ask(daemon, stream=True)]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert whole == "".join(thoughts) == scenario.REASONING, (whole, thoughts)
    return str(whole)


def errors(daemon: Daemon) -> str:
    error = raised(litellm.NotFoundError, lambda: _ask(Daemon(daemon.root, scenario.UNKNOWN)))
    bad = {"type": "function", "function": {"name": "no spaces here"}}
    raised(litellm.BadRequestError, lambda: _ask(daemon, tools=[bad]))
    return str(error)


def _ask(daemon: Daemon, **fields: Any) -> Any:
    return litellm.completion(
        model=f"openai/{daemon.model}",
        api_base=daemon.base_url,
        api_key="none",
        num_retries=0,
        **{"messages": [USER], "tools": [TOOL], "max_tokens": scenario.MAX_TOKENS, "temperature": 0}
        | fields,
    )


if __name__ == "__main__":
    main(globals())
