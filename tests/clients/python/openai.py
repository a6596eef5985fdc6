"""openai, strict: chat completions and Responses. It is not strict for embeddings, which it would
refuse as the base64 that it asks for.
"""

import json
from typing import Any

import openai
from openai import OpenAI
from openai.types.responses import ResponseInputItemParam

from tests.clients import scenario
from tests.clients.checks import Daemon, Scripted, main, raised, stopped, with_cached
from tests.sdk_unions import instances

CHAT_TOOL = {"type": "function", "function": scenario.WEATHER_TOOL}
TOOL = {"type": "function", "strict": False, **scenario.WEATHER_TOOL}


def conversation(daemon: Daemon) -> str:
    messages: list[Any] = [_user(scenario.GREETING)]
    first = _chat(daemon, messages).choices[0].message
    last = _chat(daemon, [*messages, first, _user(scenario.FAREWELL)])
    cached = last.usage.prompt_tokens_details.cached_tokens
    return with_cached(first.content, cached)


def stream(daemon: Daemon) -> str:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = _chat(daemon, [_user(scenario.GREETING)], **options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == _chat(daemon, [_user(scenario.GREETING)]).choices[0].message.content, text
    assert usage.usage.completion_tokens > 0
    return f"{len(chunks)} chunks: {text}"


def tool_loop(daemon: Daemon) -> str:
    station = scenario.WeatherStation()
    messages: list[Any] = [_user(scenario.QUESTION)]
    while (
        calls := (answer := _chat(daemon, messages, tools=[CHAT_TOOL]))
        .choices[0]
        .message.tool_calls
    ):
        messages.append(answer.choices[0].message)
        for call in calls:
            result = station.get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    return station.check(answer.choices[0].message.content)


def errors(daemon: Daemon) -> str:
    unknown = Daemon(daemon.root, scenario.UNKNOWN)
    missing = raised(openai.NotFoundError, lambda: _chat(unknown, [_user(scenario.GREETING)]))
    assert scenario.UNKNOWN in str(missing), missing
    return str(raised(openai.BadRequestError, lambda: _chat(daemon, [])))


@Scripted
def cancellation(daemon: Daemon) -> str:
    chunks = _chat(daemon, [_user(scenario.ENDLESS)], stream=True)
    next(chunks)
    return stopped(daemon, chunks.close)


@Scripted
def image(daemon: Daemon) -> str:
    """The next turn finds it cached. A tool may show one, too."""
    text = {"type": "text", "text": scenario.PICTURE_QUESTION}
    shown = {"type": "image_url", "image_url": {"url": scenario.picture_url()}}
    messages: list[Any] = [{"role": "user", "content": [text, shown]}]
    first = _chat(daemon, messages).choices[0].message
    scenario.saw_the_picture(first.content)
    last = _chat(daemon, [*messages, first, _user(scenario.FAREWELL)])
    cached = last.usage.prompt_tokens_details.cached_tokens
    function = {"name": scenario.WEATHER_TOOL["name"], "arguments": "{}"}
    call = {"id": "call_1", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "call_1", "content": [shown]}
    history = [_user(scenario.PICTURE_QUESTION), {"role": "assistant", "tool_calls": [call]}]
    answer = _chat(daemon, [*history, result]).choices[0].message
    return with_cached(scenario.saw_the_picture(answer.content), cached)


def responses_conversation(daemon: Daemon) -> str:
    """The second turn names the first and does not send it again."""
    first = _respond(daemon, scenario.GREETING)
    last = _respond(daemon, scenario.FAREWELL, previous_response_id=first.id)
    cached = last.usage.input_tokens_details.cached_tokens
    return with_cached(first.output_text, cached)


def responses_stream(daemon: Daemon) -> str:
    """The helper puts the answer together from every event, and trips over one that is missing."""
    with _client(daemon).responses.stream(**_body(daemon, scenario.GREETING)) as events:
        kinds = [event.type for event in events]
        answer = events.get_final_response()
    assert answer.output_text == _respond(daemon, scenario.GREETING).output_text, answer
    assert kinds[:2] == ["response.created", "response.in_progress"], kinds
    assert kinds[-1] == "response.completed", kinds
    return f"{len(kinds)} events: {answer.output_text}"


def responses_tool_loop(daemon: Daemon) -> str:
    station = scenario.WeatherStation()
    items: list[Any] = [_user(scenario.QUESTION)]
    while calls := _calls(answer := _respond(daemon, items, tools=[TOOL], store=False)):
        items += answer.output
        for call in calls:
            result = station.get_weather(**json.loads(call.arguments))
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )
    assert answer.usage.input_tokens_details.cached_tokens > 0
    return station.check(answer.output_text)


@Scripted
def responses_image(daemon: Daemon) -> str:
    """The next turn names the first, and does not send it again. A tool may show one, too."""
    shown = {"type": "input_image", "image_url": scenario.picture_url(), "detail": "auto"}
    text = {"type": "input_text", "text": scenario.PICTURE_QUESTION}
    first = _respond(daemon, [{"role": "user", "content": [text, shown]}])
    scenario.saw_the_picture(first.output_text)
    last = _respond(daemon, scenario.FAREWELL, previous_response_id=first.id)
    name = scenario.WEATHER_TOOL["name"]
    call = {"type": "function_call", "call_id": "call_1", "name": name, "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "call_1", "output": [shown]}
    answer = _respond(daemon, [_user(scenario.PICTURE_QUESTION), call, output], store=False)
    cached = last.usage.input_tokens_details.cached_tokens
    return with_cached(scenario.saw_the_picture(answer.output_text), cached)


def responses_errors(daemon: Daemon) -> str:
    unknown = Daemon(daemon.root, scenario.UNKNOWN)
    missing = raised(openai.NotFoundError, lambda: _respond(unknown, scenario.GREETING))
    assert scenario.UNKNOWN in str(missing), missing
    refused: Any = raised(openai.BadRequestError, lambda: _respond(daemon, "word " * 100_000))
    assert refused.code == "context_length_exceeded", refused
    return str(refused)


@Scripted
def responses_cancellation(daemon: Daemon) -> str:
    events = _respond(daemon, scenario.ENDLESS, stream=True)
    next(events)
    return stopped(daemon, events.close)


def responses_histories(daemon: Daemon) -> str:
    """Every kind of item that the library knows, one by one, in a history."""
    kinds = [item for item in instances(ResponseInputItemParam) if "type" in item]
    items = [item for item in kinds if item["type"] != "item_reference"]
    for item in items:
        _respond(daemon, [_user(scenario.GREETING), item, _user(scenario.FAREWELL)])
    return f"{len(items)} kinds of items"


@Scripted
def responses_reasoning(daemon: Daemon) -> str:
    item, _ = _respond(daemon, scenario.GREETING).output
    assert item.type == "reasoning", item
    assert item.content[0].text == scenario.REASONING, item
    return scenario.REASONING


def _calls(answer: Any) -> list[Any]:
    return [item for item in answer.output if item.type == "function_call"]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _chat(daemon: Daemon, messages: list[Any], **fields: Any) -> Any:
    return _client(daemon).chat.completions.create(
        model=daemon.model,
        messages=messages,
        max_tokens=scenario.MAX_TOKENS,
        temperature=0,
        **fields,
    )


def _respond(daemon: Daemon, items: Any, **fields: Any) -> Any:
    return _client(daemon).responses.create(**_body(daemon, items), **fields)


def _body(daemon: Daemon, items: Any) -> dict[str, Any]:
    return {
        "model": daemon.model,
        "instructions": scenario.SYSTEM,
        "input": items,
        "max_output_tokens": scenario.MAX_TOKENS,
        "temperature": 0,
    }


def embeddings(daemon: Daemon) -> str:
    client: Any = OpenAI(base_url=daemon.base_url, api_key="none", max_retries=0)
    texts = list(scenario.LIBRARY.values())

    def vectors(asked: list[str], **how: str) -> list[list[float]]:
        answer = client.embeddings.create(model=daemon.model, input=asked, **how)
        return [one.embedding for one in answer.data]

    by_default, as_floats = vectors(texts), vectors(texts, encoding_format="float")
    for one, other in zip(by_default, as_floats, strict=True):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-6

    def search(query: str) -> str:
        (asked,) = vectors([query])
        scores = [sum(a * b for a, b in zip(asked, own, strict=True)) for own in by_default]
        return texts[scores.index(max(scores))]

    return scenario.found_in(search)


def _client(daemon: Daemon) -> Any:
    return OpenAI(
        base_url=daemon.base_url,
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    )


if __name__ == "__main__":
    main(globals())
