"""pydantic-ai: agents with a tool, and with a typed output by tool and by schema."""

import asyncio
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ThinkingPart, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients import scenario
from tests.clients.checks import Daemon, Scripted, main, raised, with_cached


class Report(BaseModel):
    """A weather report."""

    sky: Literal["sunny", "rainy"]
    degrees: int = Field(ge=0, le=40)


def conversation(daemon: Daemon) -> str:
    first = _agent(daemon).run_sync(scenario.GREETING)
    last = _agent(daemon).run_sync(scenario.FAREWELL, message_history=first.all_messages())
    cached = last.usage.cache_read_tokens
    return with_cached(first.output, cached)


def tool_loop(daemon: Daemon) -> str:
    station = scenario.WeatherStation()
    agent = _agent(daemon, tools=[station.get_weather], system_prompt=scenario.SYSTEM)
    result = agent.run_sync(scenario.QUESTION)
    cached = result.usage.cache_read_tokens
    return with_cached(station.check(result.output), cached)


def streamed_tool_loop(daemon: Daemon) -> str:
    station = scenario.WeatherStation()
    result = _agent(daemon, tools=[station.get_weather]).run_stream_sync(scenario.QUESTION)
    answer = "".join(result.stream_text(delta=True))
    assert result.usage.cache_read_tokens > 0
    return station.check(answer)


def output_by_tool(daemon: Daemon) -> str:
    """A tool choice of `required`, and a tool that ends the run."""
    return _output(daemon, ToolOutput(Report, strict=True))


def output_by_schema(daemon: Daemon) -> str:
    return _output(daemon, NativeOutput(Report, strict=True))


@Scripted
def tool_and_output(daemon: Daemon) -> str:
    """A tool first, then the output tool, every call required."""
    station = scenario.WeatherStation()
    agent = _agent(daemon, tools=[station.get_weather], output_type=ToolOutput(Report))
    report = agent.run_sync(scenario.QUESTION).output
    assert isinstance(report, Report), report
    return station.check(repr(report))


@Scripted
def reasoning(daemon: Daemon) -> str:
    """In both turns; the first's is sent back."""
    station = scenario.WeatherStation()
    messages = (
        _agent(daemon, tools=[station.get_weather]).run_sync(scenario.QUESTION).all_messages()
    )
    thoughts = [part for message in messages for part in message.parts]
    thoughts = [part.content for part in thoughts if isinstance(part, ThinkingPart)]
    assert thoughts == [scenario.REASONING, scenario.REASONING], thoughts
    return repr(thoughts)


@Scripted
def cancellation(daemon: Daemon) -> str:
    async def run() -> str:
        async with _agent(daemon).run_stream(scenario.ENDLESS) as result:
            await anext(result.stream_text(delta=True, debounce_by=None))
            await asyncio.to_thread(daemon.wait_until_it_runs, 1)
        await asyncio.to_thread(daemon.wait_until_it_runs, 0)
        return "nothing runs any more"

    return asyncio.run(run())


def errors(daemon: Daemon) -> str:
    unknown = Daemon(daemon.root, scenario.UNKNOWN)
    error = raised(ModelHTTPError, lambda: _agent(unknown).run_sync(scenario.QUESTION))
    assert isinstance(error, ModelHTTPError)
    assert error.status_code == 404
    raised(ModelHTTPError, lambda: _agent(daemon).run_sync("word " * 100_000))
    return str(error)


def _output(daemon: Daemon, output_type: Any) -> str:
    report = _agent(daemon, output_type=output_type, retries=0).run_sync(scenario.QUESTION).output
    assert isinstance(report, Report), report
    return repr(report)


def _agent(daemon: Daemon, **options: Any) -> Any:
    provider = OpenAIProvider(base_url=daemon.base_url, api_key="none")
    settings = {"temperature": 0.0, "max_tokens": scenario.MAX_TOKENS}
    return Agent(
        OpenAIChatModel(daemon.model, provider=provider), model_settings=settings, **options
    )


if __name__ == "__main__":
    main(globals())
