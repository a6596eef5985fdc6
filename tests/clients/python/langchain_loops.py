"""What langchain's chat models are put through, whichever API they speak."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import StructuredTool

from tests.clients import scenario
from tests.clients.checks import Check, Daemon, Scripted, stopped


@dataclass(frozen=True)
class Loops:
    """Checks of the chat model that `model` makes of a daemon."""

    model: Callable[[Daemon], Any]
    streaming_model: Callable[[Daemon], Any]

    def checks(self) -> tuple[Check | Scripted, ...]:
        """Those that every chat model passes."""
        return (
            self.conversation,
            self.stream,
            self.tool_loop,
            self.streamed_tool_loop,
            Scripted(self.cancellation),
        )

    def conversation(self, daemon: Daemon) -> str:
        question = [SystemMessage(scenario.SYSTEM), HumanMessage(scenario.GREETING)]
        first = self.model(daemon).invoke(question)
        last = self.model(daemon).invoke([*question, first, HumanMessage(scenario.FAREWELL)])
        assert first.text
        return f"{first.text} ({_cached(last)} cached)"

    def stream(self, daemon: Daemon) -> str:
        chunks = list(self.model(daemon).stream(scenario.GREETING))
        text = "".join(chunk.text for chunk in chunks)
        assert text == self.model(daemon).invoke(scenario.GREETING).text, text
        return f"{len(chunks)} chunks: {text}"

    def tool_loop(self, daemon: Daemon) -> str:
        return tool_loop(self.model(daemon), lambda bound, messages: bound.invoke(messages))

    def streamed_tool_loop(self, daemon: Daemon) -> str:
        model = self.streaming_model(daemon)
        return tool_loop(model, joined, parallel_tool_calls=False)

    def required_call(self, daemon: Daemon, **options: Any) -> str:
        _, tool = weather_tool()
        model = self.model(daemon).bind_tools([tool], **options)
        (call,) = model.invoke([HumanMessage(scenario.QUESTION)]).tool_calls
        assert call["args"] == {"city": scenario.CITY, "day": scenario.DAY}, call
        return f"{call['name']} {call['args']}"

    def cancellation(self, daemon: Daemon) -> str:
        chunks = self.model(daemon).stream(scenario.ENDLESS)
        next(chunks)
        return stopped(daemon, chunks.close)


def weather_tool() -> tuple[scenario.WeatherStation, Any]:
    station = scenario.WeatherStation()
    return station, StructuredTool.from_function(station.get_weather)


def tool_loop(model: Any, ask: Any, **options: Any) -> str:
    station, tool = weather_tool()
    bound = model.bind_tools([tool], **options)
    messages: list[Any] = [SystemMessage(scenario.SYSTEM), HumanMessage(scenario.QUESTION)]
    while (answer := ask(bound, messages)).tool_calls:
        messages += [answer, *map(tool.invoke, answer.tool_calls)]
    return f"{station.check(answer.text)} ({_cached(answer)} cached)"


def joined(bound: Any, messages: list[Any]) -> Any:
    """A stream's message: its chunks add up to it."""
    chunks = bound.stream(messages)
    whole = next(chunks)
    for chunk in chunks:
        whole += chunk
    return whole


def _cached(answer: Any) -> int:
    cached = answer.usage_metadata["input_token_details"]["cache_read"]
    assert cached > 0
    return int(cached)
