"""Codex, `codex exec`: its shell tool, over Responses."""

import tempfile
from pathlib import Path
from typing import Any

from tests.clients.checks import Daemon, main
from tests.clients.programs.agent import Agent, shared
from tests.clients.scenario import FAREWELL, GREETING, QUESTION, UNKNOWN, knows_the_weather

EXEC = ("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
RESUME = (*EXEC, "resume", "--last")
ONE_QUESTION = (*EXEC, GREETING)


def conversation(daemon: Daemon) -> str:
    """The second turn is a process of its own, which resumes the first."""
    with tempfile.TemporaryDirectory() as home:
        agent = agent_in(home, daemon)
        events = agent.run(*EXEC, GREETING)
        (first,) = _messages(events)
        assert not [item for item in _items(events) if item["type"] == "error"], events
        resumed = agent.run(*RESUME, FAREWELL)
    assert first
    return f"{first} ({_cached(resumed)})"


def tool_loop(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        events = agent_in(home, daemon).run(*EXEC, QUESTION)
    (command,) = [item for item in _items(events) if item["type"] == "command_execution"]
    assert command["exit_code"] == 0, command
    (answer,) = _messages(events)
    return f"{knows_the_weather(answer)} ({_cached(events)})"


def two_folders(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        for agent in agent_in(home, daemon).in_two_folders():
            events = agent.run(*ONE_QUESTION)
    return shared(*_usage(events), least=0.95)


def errors(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        *_, last = agent_in(home, daemon).run(*EXEC, "-m", UNKNOWN, GREETING)
    assert last["type"] == "turn.failed", last
    assert UNKNOWN in last["error"]["message"], last
    return str(last["error"]["message"])


def cancellation(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        return agent_in(home, daemon).cancel(*EXEC)


def _messages(events: list[Any]) -> list[str]:
    return [item["text"] for item in _items(events) if item["type"] == "agent_message"]


def _items(events: list[Any]) -> list[Any]:
    return [event["item"] for event in events if event["type"] == "item.completed"]


def _cached(events: list[Any]) -> str:
    """Codex adds its two requests up. The second found what the first was."""
    return shared(*_usage(events), least=0.48)


def _usage(events: list[Any]) -> tuple[int, int]:
    usage = events[-1]["usage"]
    return usage["cached_input_tokens"], usage["input_tokens"]


def agent_in(home: str, daemon: Daemon) -> Agent:
    return Agent("codex", "codex", Path(home), daemon)


if __name__ == "__main__":
    main(scripted=[conversation, tool_loop, two_folders, errors, cancellation])
