"""instructor: a typed object, in the modes that an OpenAI-compatible server is used with."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import instructor
import openai
from instructor import Mode
from instructor.core import InstructorRetryException
from pydantic import BaseModel, ConfigDict, Field

from tests.clients.checks import Daemon, Scripted, main, raised, stopped
from tests.clients.scenario import ENDLESS, MAX_TOKENS, QUESTION, UNKNOWN


class Report(BaseModel):
    """A weather report, and nothing else: a small model would go on."""

    model_config = ConfigDict(extra="forbid")

    sky: Literal["sunny", "rainy"]
    degrees: int = Field(ge=0, le=40)


def object_by_tool(daemon: Daemon) -> str:
    return _object(daemon, Mode.TOOLS)


def object_by_strict_tool(daemon: Daemon) -> str:
    return _object(daemon, Mode.TOOLS_STRICT)


def object_by_schema(daemon: Daemon) -> str:
    return _object(daemon, Mode.JSON_SCHEMA)


def streamed_object(daemon: Daemon) -> str:
    """Partial objects, as their fields arrive."""
    partials = list(
        _client(daemon, Mode.TOOLS).create_partial(response_model=Report, **_body(daemon.model))
    )
    last = partials[-1]
    assert last.sky in {"sunny", "rainy"}
    assert isinstance(last.degrees, int)
    return f"{len(partials)} partials, {last!r}"


@Scripted
def several_objects(daemon: Daemon) -> str:
    reports = list(
        _client(daemon, Mode.TOOLS).create_iterable(response_model=Report, **_body(daemon.model))
    )
    assert [type(report) for report in reports] == [Report]
    return repr(reports)


def conversation(daemon: Daemon) -> str:
    """A report, then another with the first before it."""
    client = _client(daemon, Mode.JSON_SCHEMA)
    body = _body(daemon.model)
    report = client.create(response_model=Report, **body)
    answer = {"role": "assistant", "content": report.model_dump_json()}
    body["messages"] += [answer, {"role": "user", "content": QUESTION}]
    _, completion = client.create_with_completion(response_model=Report, **body)
    cached = completion.usage.prompt_tokens_details.cached_tokens
    assert cached > 0
    return f"{cached} cached"


def errors(daemon: Daemon) -> str:
    def unknown() -> object:
        client = _client(daemon, Mode.TOOLS)
        return client.create(response_model=Report, max_retries=0, **_body(UNKNOWN))

    error = raised(InstructorRetryException, unknown)
    assert UNKNOWN in str(error)
    return str(error)


@Scripted
def cancellation(daemon: Daemon) -> str:
    """instructor hands out nothing of a stream before its end, so it is given up by its timeout."""
    body = _body(daemon.model) | {"messages": [{"role": "user", "content": ENDLESS}]}
    client = _client(daemon, Mode.TOOLS)

    def wait_in_vain() -> object:
        return client.create(response_model=Report, max_retries=0, timeout=1, **body)

    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(raised, InstructorRetryException, wait_in_vain)
        return stopped(daemon, waiting.result)


def _object(daemon: Daemon, mode: Mode) -> str:
    report = _client(daemon, mode).create(
        response_model=Report, max_retries=0, **_body(daemon.model)
    )
    assert isinstance(report, Report), report
    return repr(report)


def _body(model: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}


def _client(daemon: Daemon, mode: Any) -> Any:
    client = openai.OpenAI(base_url=daemon.base_url, api_key="none", max_retries=0)
    return instructor.from_openai(client, mode=mode)


if __name__ == "__main__":
    main(globals())
