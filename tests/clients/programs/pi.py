"""pi, `pi -p`: its bash tool, over chat."""

import tempfile
from pathlib import Path
from typing import Any

from tests.clients.checks import Daemon, main
from tests.clients.programs.agent import Agent, shared
from tests.clients.scenario import FAREWELL, GREETING, QUESTION, knows_the_weather

ASK = ("--mode", "json", "-p")
ONE_QUESTION = (*ASK, GREETING)


def conversation(daemon: Daemon) -> str:
    """The second turn is a process of its own, which resumes the first."""
    with tempfile.TemporaryDirectory() as home:
        agent = agent_in(home, daemon)
        first = _text(agent.run(*ASK, GREETING))
        cached, asked = _usage(agent.run(*ASK, "--continue", FAREWELL))
    return f"{first} ({shared(cached, asked, least=0.95)})"


def tool_loop(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        events = agent_in(home, daemon).run(*ASK, QUESTION)
    cached, asked = _usage(events)
    return f"{knows_the_weather(_text(events))} ({shared(cached, asked, least=0.9)})"


def two_folders(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        for agent in agent_in(home, daemon).in_two_folders():
            events = agent.run(*ONE_QUESTION)
    return shared(*_usage(events), least=0.9)


def cancellation(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        return agent_in(home, daemon).cancel(*ASK)


def _text(events: list[Any]) -> str:
    return "".join(part["text"] for part in _answer(events)["content"] if part["type"] == "text")


def _usage(events: list[Any]) -> tuple[int, int]:
    """Of the last request: its tokens that were cached, and all."""
    usage = _answer(events)["usage"]
    return usage["cacheRead"], usage["cacheRead"] + usage["input"]


def _answer(events: list[Any]) -> Any:
    assert events[-1]["type"] == "agent_end", events[-1]
    return events[-1]["messages"][-1]


def agent_in(home: str, daemon: Daemon) -> Agent:
    return Agent("pi", "pi", Path(home), daemon, {"PI_OFFLINE": "1"})


if __name__ == "__main__":
    main(scripted=[conversation, tool_loop, two_folders, cancellation])
