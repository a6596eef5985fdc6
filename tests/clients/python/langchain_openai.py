"""langchain-openai: ChatOpenAI with bound tools and with_structured_output."""

from typing import Any, Literal

import openai
from langchain_core.messages import HumanMessage
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field, SecretStr

from tests.clients.checks import Daemon, main, raised
from tests.clients.python import langchain_loops as loops
from tests.clients.scenario import (
    CITY,
    DAY,
    LIBRARY,
    MAX_TOKENS,
    QUESTION,
    UNKNOWN,
    found_in,
)


class Report(BaseModel):
    """A weather report."""

    sky: Literal["sunny", "rainy"]
    degrees: int = Field(ge=0, le=40)


def conversation(daemon: Daemon) -> str:
    return loops.conversation(_model(daemon))


def stream(daemon: Daemon) -> str:
    return loops.stream(_model(daemon))


def tool_loop(daemon: Daemon) -> str:
    return loops.tool_loop(_model(daemon))


def streamed_tool_loop(daemon: Daemon) -> str:
    model = _model(daemon, stream_usage=True)
    return loops.streamed_tool_loop(model, parallel_tool_calls=False)


def responses_tool_loop(daemon: Daemon) -> str:
    return loops.tool_loop(_model(daemon, use_responses_api=True))


def responses_streamed_tool_loop(daemon: Daemon) -> str:
    return loops.streamed_tool_loop(_model(daemon, use_responses_api=True))


def required_and_strict(daemon: Daemon) -> str:
    _, tool = loops.weather_tool()
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
    unknown = Daemon(daemon.root, UNKNOWN)
    raised(openai.NotFoundError, lambda: _model(unknown).invoke(QUESTION))
    return str(bad)


def cancellation(daemon: Daemon) -> str:
    return loops.cancellation(daemon, _model(daemon))


def _structured(daemon: Daemon, method: str) -> str:
    report = _model(daemon).with_structured_output(Report, method=method).invoke(QUESTION)
    assert isinstance(report, Report), report
    return repr(report)


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


def small_index(daemon: Daemon) -> str:
    embeddings = OpenAIEmbeddings(
        model=daemon.model,
        base_url=daemon.base_url,
        api_key=SecretStr("none"),
        check_embedding_ctx_length=False,  # else it sends tokens of OpenAI's models
        max_retries=0,
    )
    index = InMemoryVectorStore.from_texts(list(LIBRARY.values()), embeddings)
    return found_in(lambda query: index.similarity_search(query, k=1)[0].page_content)


if __name__ == "__main__":
    main(
        conversation,
        stream,
        tool_loop,
        streamed_tool_loop,
        responses_tool_loop,
        responses_streamed_tool_loop,
        required_and_strict,
        structured_by_schema,
        structured_by_function,
        errors,
        small_index,
        scripted=[structured_by_json_mode, cancellation],
    )
