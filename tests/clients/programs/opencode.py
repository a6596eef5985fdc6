"""OpenCode, `opencode run`: its bash tool, over chat."""

import tempfile
from pathlib import Path
from typing import Any

from tests.clients.checks import Daemon, main
from tests.clients.programs.agent import Agent, shared
from tests.clients.scenario import FAREWELL, GREETING, QUESTION, knows_the_weather

ASK = ("run", "--format", "json")
QUIET = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "npm_config_registry": "http://127.0.0.1:9/",  # of what it installs for plugins, in vain
}
ONE_QUESTION = (*ASK, GREETING)


def conversation(daemon: Daemon) -> str:
    """The second turn is a process of its own, which resumes the first."""
    with tempfile.TemporaryDirectory() as home:
        agent = agent_in(home, daemon)
        first = _text(agent.run(*ASK, GREETING))
        cached = _cached(agent.run(*ASK, "--continue", FAREWELL))
    return f"{first} ({cached})"


def tool_loop(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        events = agent_in(home, daemon).run(*ASK, QUESTION)
    (call,) = _parts(events, "tool_use")
    assert call["state"]["status"] == "completed", call
    return f"{knows_the_weather(_text(events))} ({_cached(events)})"


def two_folders(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        for agent in agent_in(home, daemon).in_two_folders():
            events = agent.run(*ONE_QUESTION)
    return shared(*_usage(events), least=0.9)


def errors(daemon: Daemon) -> str:
    """A prompt longer than the context, where OpenCode counts fewer tokens."""
    with tempfile.TemporaryDirectory() as home:
        *_, last = agent_in(home, daemon).run(*ASK, *["word " * 20_000] * 3)
    assert last["type"] == "error", last
    return str(last["error"]["data"]["message"])


def cancellation(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        return agent_in(home, daemon).cancel(*ASK)


def _text(events: list[Any]) -> str:
    return "".join(part["text"] for part in _parts(events, "text"))


def _parts(events: list[Any], kind: str) -> list[Any]:
    return [event["part"] for event in events if event["type"] == kind]


def _cached(events: list[Any]) -> str:
    """The last request found what the one before it was."""
    return shared(*_usage(events), least=0.95)


def _usage(events: list[Any]) -> tuple[int, int]:
    """Of the last request: its tokens that were cached, and all."""
    tokens = _parts(events, "step_finish")[-1]["tokens"]
    cached = tokens["cache"]["read"]
    return cached, cached + tokens["input"]


def agent_in(home: str, daemon: Daemon) -> Agent:
    return Agent("opencode", "opencode", Path(home), daemon, QUIET)


if __name__ == "__main__":
    main(scripted=[conversation, tool_loop, two_folders, errors, cancellation])
