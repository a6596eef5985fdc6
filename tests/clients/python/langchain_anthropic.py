"""langchain-anthropic: ChatAnthropic with bound tools."""

from typing import Any

import anthropic
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from pydantic import SecretStr

from tests.clients.checks import Daemon, main, raised
from tests.clients.python import langchain_loops as loops
from tests.clients.scenario import CITY, DAY, GREETING, MAX_TOKENS, QUESTION, UNKNOWN


def conversation(daemon: Daemon) -> str:
    return loops.conversation(_model(daemon))


def stream(daemon: Daemon) -> str:
    return loops.stream(_model(daemon))


def tool_loop(daemon: Daemon) -> str:
    return loops.tool_loop(_model(daemon))


def streamed_tool_loop(daemon: Daemon) -> str:
    return loops.streamed_tool_loop(_model(daemon), parallel_tool_calls=False)


def required(daemon: Daemon) -> str:
    _, tool = loops.weather_tool()
    model = _model(daemon).bind_tools([tool], tool_choice="any")
    (call,) = model.invoke([HumanMessage(QUESTION)]).tool_calls
    assert call["args"] == {"city": CITY, "day": DAY}, call
    return f"{call['name']} {call['args']}"


def errors(daemon: Daemon) -> str:
    unknown = Daemon(daemon.root, UNKNOWN)
    return str(raised(anthropic.NotFoundError, lambda: _model(unknown).invoke(GREETING)))


def cancellation(daemon: Daemon) -> str:
    return loops.cancellation(daemon, _model(daemon))


def _model(daemon: Daemon) -> Any:
    return ChatAnthropic(
        base_url=daemon.root,
        api_key=SecretStr("none"),
        model_name=daemon.model,
        temperature=0,
        max_tokens_to_sample=MAX_TOKENS,
        max_retries=0,
        timeout=None,
        stop=None,
    )


if __name__ == "__main__":
    main(
        conversation,
        stream,
        tool_loop,
        streamed_tool_loop,
        required,
        errors,
        scripted=[cancellation],
    )
