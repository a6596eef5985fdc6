"""langchain-openai: ChatOpenAI with bound tools and with_structured_output."""

from functools import partial
from typing import Any, Literal

import openai
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field, SecretStr

from tests.clients.checks import Daemon, Scripted, main, raised
from tests.clients.python.langchain_loops import Loops
from tests.clients.scenario import (
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


def responses_tool_loop(daemon: Daemon) -> str:
    return RESPONSES.tool_loop(daemon)


def responses_streamed_tool_loop(daemon: Daemon) -> str:
    return RESPONSES.streamed_tool_loop(daemon)


def required_and_strict(daemon: Daemon) -> str:
    return LOOPS.required_call(daemon, tool_choice="required", strict=True)


def structured_by_schema(daemon: Daemon) -> str:
    return _structured(daemon, "json_schema")


def structured_by_function(daemon: Daemon) -> str:
    return _structured(daemon, "function_calling")


@Scripted
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


LOOPS = Loops(_model, partial(_model, stream_usage=True))
RESPONSES = Loops(*[partial(_model, use_responses_api=True)] * 2)

if __name__ == "__main__":
    main(globals(), *LOOPS.checks())
