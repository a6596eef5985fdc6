"""llm: its models, tools and conversations, over an entry of extra-openai-models.yaml."""

import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import llm

from tests.clients import scenario
from tests.clients.checks import Daemon, Scripted, main, raised, stopped, with_cached

ENTRY = """
- model_id: {model}
  model_name: {model}
  api_base: {base_url}
  supports_tools: true
"""


def conversation(daemon: Daemon) -> str:
    talk = _model(daemon).conversation()
    first = talk.prompt(scenario.GREETING, stream=False, **_options()).text()
    last = talk.prompt(scenario.FAREWELL, stream=False, **_options())
    last.text()
    cached = last.usage().details["prompt_tokens_details"]["cached_tokens"]
    return with_cached(first, cached)


def stream(daemon: Daemon) -> str:
    slices = list(_model(daemon).prompt(scenario.GREETING, **_options()))
    text = _model(daemon).prompt(scenario.GREETING, stream=False, **_options()).text()
    assert "".join(slices) == text, slices
    return f"{len(slices)} slices: {text}"


def tool_loop(daemon: Daemon) -> str:
    return _tool_loop(daemon, stream=False)


def streamed_tool_loop(daemon: Daemon) -> str:
    return _tool_loop(daemon, stream=True)


def errors(daemon: Daemon) -> str:
    unknown = _model(Daemon(daemon.root, scenario.UNKNOWN))
    error = raised(Exception, unknown.prompt(scenario.GREETING, **_options()).text)
    assert scenario.UNKNOWN in str(error)
    return str(error)


@Scripted
def cancellation(daemon: Daemon) -> str:
    """llm leaves the connection to the garbage collector."""
    slices = iter(_model(daemon).prompt(scenario.ENDLESS, **_options()))
    next(slices)

    def close() -> None:
        slices.close()
        gc.collect()

    return stopped(daemon, close)


def _tool_loop(daemon: Daemon, stream: bool) -> str:
    station = scenario.WeatherStation()
    chain = _model(daemon).chain(
        scenario.QUESTION, tools=[station.get_weather], stream=stream, options=_options()
    )
    return station.check(chain.text())


def _options() -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": scenario.MAX_TOKENS}


def _model(daemon: Daemon) -> Any:
    entry = ENTRY.format(model=daemon.model, base_url=daemon.base_url)
    (Path(os.environ["LLM_USER_PATH"]) / "extra-openai-models.yaml").write_text(entry)
    model: Any = llm.get_model(daemon.model)
    model.key = "none"
    return model


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        os.environ["LLM_USER_PATH"] = home
        main(globals())
