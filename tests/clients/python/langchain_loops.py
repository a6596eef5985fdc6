"""What langchain's chat models are put through, whichever API they speak."""

from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import StructuredTool

from tests.clients.checks import Daemon, stopped
from tests.clients.scenario import ENDLESS, FAREWELL, GREETING, QUESTION, SYSTEM, WeatherStation


def conversation(model: Any) -> str:
    messages: list[Any] = [SystemMessage(SYSTEM), HumanMessage(GREETING)]
    first = model.invoke(messages)
    last = model.invoke([*messages, first, HumanMessage(FAREWELL)])
    assert first.text
    return f"{first.text} ({_cached(last)} cached)"


def stream(model: Any) -> str:
    chunks = list(model.stream(GREETING))
    text = "".join(chunk.text for chunk in chunks)
    assert text == model.invoke(GREETING).text, text
    return f"{len(chunks)} chunks: {text}"


def tool_loop(model: Any, **options: Any) -> str:
    return _tool_loop(model, lambda bound, messages: bound.invoke(messages), **options)


def streamed_tool_loop(model: Any, **options: Any) -> str:
    return _tool_loop(model, lambda bound, messages: _joined(bound.stream(messages)), **options)


def cancellation(daemon: Daemon, model: Any) -> str:
    chunks = model.stream(ENDLESS)
    next(chunks)
    return stopped(daemon, chunks.close)


def weather_tool() -> tuple[WeatherStation, Any]:
    station = WeatherStation()
    return station, StructuredTool.from_function(station.get_weather)


def _tool_loop(model: Any, ask: Any, **options: Any) -> str:
    station, tool = weather_tool()
    bound = model.bind_tools([tool], **options)
    messages: list[Any] = [SystemMessage(SYSTEM), HumanMessage(QUESTION)]
    while (answer := ask(bound, messages)).tool_calls:
        messages += [answer, *map(tool.invoke, answer.tool_calls)]
    return f"{station.check(answer.text)} ({_cached(answer)} cached)"


def _joined(chunks: Any) -> Any:
    """Message chunks add up to the message."""
    whole = next(chunks)
    for chunk in chunks:
        whole += chunk
    return whole


def _cached(answer: Any) -> int:
    cached = answer.usage_metadata["input_token_details"]["cache_read"]
    assert cached > 0
    return int(cached)
