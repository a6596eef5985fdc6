"""openai-agents: an agent with a tool, over Responses (its own default) and over chat."""

import asyncio
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from tests.clients import scenario
from tests.clients.checks import Daemon, Scripted, main, raised, stopped, with_cached

set_tracing_disabled(True)


def conversation(daemon: Daemon) -> str:
    first = Runner.run_sync(_agent(daemon), scenario.GREETING)
    items = [*first.to_input_list(), {"role": "user", "content": scenario.FAREWELL}]
    last = Runner.run_sync(_agent(daemon), items)
    cached = last.context_wrapper.usage.input_tokens_details.cached_tokens
    return with_cached(first.final_output, cached)


def stream(daemon: Daemon) -> str:
    async def run() -> list[str]:
        result = Runner.run_streamed(_agent(daemon), scenario.GREETING)
        return [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]

    deltas = asyncio.run(run())
    assert "".join(deltas) == Runner.run_sync(_agent(daemon), scenario.GREETING).final_output, (
        deltas
    )
    return f"{len(deltas)} deltas: {''.join(deltas)}"


def tool_loop(daemon: Daemon) -> str:
    return _tool_loop(daemon, OpenAIResponsesModel)


def chat_tool_loop(daemon: Daemon) -> str:
    return _tool_loop(daemon, OpenAIChatCompletionsModel)


def errors(daemon: Daemon) -> str:
    unknown = Daemon(daemon.root, scenario.UNKNOWN)
    return str(
        raised(openai.NotFoundError, lambda: Runner.run_sync(_agent(unknown), scenario.GREETING))
    )


@Scripted
def cancellation(daemon: Daemon) -> str:
    async def run() -> str:
        result = Runner.run_streamed(_agent(daemon), scenario.ENDLESS)
        await anext(aiter(result.stream_events()))
        loop = asyncio.get_running_loop()
        # From another thread: this one has the connection to close.
        cancel = lambda: loop.call_soon_threadsafe(result.cancel)  # noqa: E731
        return await asyncio.to_thread(stopped, daemon, cancel)

    return asyncio.run(run())


def _tool_loop(daemon: Daemon, model: Any) -> str:
    station = scenario.WeatherStation()
    tool = function_tool(station.get_weather)
    result = Runner.run_sync(_agent(daemon, model, tools=[tool]), scenario.QUESTION)
    cached = result.context_wrapper.usage.input_tokens_details.cached_tokens
    return with_cached(station.check(result.final_output), cached)


def _agent(daemon: Daemon, model: Any = OpenAIResponsesModel, **options: Any) -> Any:
    client = AsyncOpenAI(base_url=daemon.base_url, api_key="none", max_retries=0)
    return Agent(
        name="Reporter",
        instructions=scenario.SYSTEM,
        model=model(model=daemon.model, openai_client=client),
        model_settings=ModelSettings(temperature=0, max_tokens=scenario.MAX_TOKENS),
        **options,
    )


if __name__ == "__main__":
    main(globals())
