"""langchain-openai: ChatOpenAI with bound tools and with_structured_output."""

from typing import Any, Literal

import openai
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

from tests.clients.checks import Daemon, main, raised
from tests.clients.scenario import (
    CITY,
    DAY,
    MAX_TOKENS,
    QUESTION,
    SYSTEM,
    WeatherStation,
)


class Report(BaseModel):
    """A weather report."""

    sky: Literal["sunny", "rainy"]
    degrees: int = Field(ge=0, le=40)


def tool_loop(daemon: Daemon) -> str:
    station, tool = _tool()
    model = _model(daemon).bind_tools([tool])
    messages: list[Any] = [SystemMessage(SYSTEM), HumanMessage(QUESTION)]
    while (answer := model.invoke(messages)).tool_calls:
        messages += [answer, *map(tool.invoke, answer.tool_calls)]
    cached = answer.usage_metadata["input_token_details"]["cache_read"]
    assert cached > 0
    return f"{station.check(answer.text)} ({cached} cached)"


def streamed_tool_loop(daemon: Daemon) -> str:
    station, tool = _tool()
    model = _model(daemon, stream_usage=True).bind_tools([tool], parallel_tool_calls=False)
    messages: list[Any] = [HumanMessage(QUESTION)]
    while (answer := _joined(model.stream(messages))).tool_calls:
        messages += [answer, *map(tool.invoke, answer.tool_calls)]
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
    return station.check(answer.text)


def required_and_strict(daemon: Daemon) -> str:
    _, tool = _tool()
    model = _model(daemon).bind_tools([tool], tool_choice="required", strict=True)
    (call,) = model.invoke([HumanMessage(QUESTION)]).tool_calls
    assert call["args"] == {"city": CITY, "day": DAY}, call
    return f"{call['name']} {call['args']}"


def structured_by_schema(daemon: Daemon) -> str:
    return _structured(daemon, "json_schema")


def structured_by_function(daemon: Daemon) -> str:
    return _structured(daemon, "function_calling")


def structured_by_json_mode(daemon: Daemon) -> str:
    return _structured(daemon, "json_mode")


def errors(daemon: Daemon) -> str:
    broken = {"type": "function", "function": {"name": "no spaces here"}}
    bad = raised(
        openai.BadRequestError, lambda: _model(daemon).bind_tools([broken]).invoke(QUESTION)
    )
    unknown = Daemon(daemon.base_url, "nonesuch")
    raised(openai.NotFoundError, lambda: _model(unknown).invoke(QUESTION))
    return str(bad)


def _structured(daemon: Daemon, method: str) -> str:
    report = _model(daemon).with_structured_output(Report, method=method).invoke(QUESTION)
    assert isinstance(report, Report), report
    return repr(report)


def _tool() -> tuple[WeatherStation, Any]:
    station = WeatherStation()
    return station, StructuredTool.from_function(station.get_weather)


def _joined(chunks: Any) -> Any:
    """Message chunks add up to the message."""
    whole = next(chunks)
    for chunk in chunks:
        whole += chunk
    return whole


def _model(daemon: Daemon, **options: Any) -> Any:
    return ChatOpenAI(
        base_url=daemon.base_url,
        api_key=SecretStr("none"),
        model=daemon.model,
        temperature=0,
        max_tokens=MAX_TOKENS,
        max_retries=0,
        **options,
    )


if __name__ == "__main__":
    main(
        tool_loop,
        streamed_tool_loop,
        required_and_strict,
        structured_by_schema,
        structured_by_function,
        errors,
        scripted=[structured_by_json_mode],
    )
