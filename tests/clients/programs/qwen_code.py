"""Qwen Code, `qwen -p`, over chat. It asks a small question beside each of the user's."""

import tempfile
from pathlib import Path
from typing import Any

from tests.clients.checks import Daemon, main
from tests.clients.programs.agent import Agent, shared
from tests.clients.scenario import FAREWELL, GREETING

ASK = ("-o", "stream-json")
ONE_QUESTION = (*ASK, "-p", GREETING)


def conversation(daemon: Daemon) -> str:
    """The second turn is a process of its own, which resumes the first."""
    with tempfile.TemporaryDirectory() as home:
        agent = agent_in(home, daemon)
        first = agent.run(*ASK, "-p", GREETING)[-1]["result"]
        cached, asked = _usage(agent.run(*ASK, "--continue", "-p", FAREWELL))
    return f"{first} ({shared(cached, asked, least=0.9)})"


def two_folders(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        for agent in agent_in(home, daemon).in_two_folders():
            lines = agent.run(*ONE_QUESTION)
    return shared(*_usage(lines), least=0.9)


def cancellation(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        return agent_in(home, daemon).cancel(*ASK, "-p")


def _usage(lines: list[Any]) -> tuple[int, int]:
    """Of the last answer: the prompt's tokens that were cached, and all."""
    assert lines[-1]["type"] == "result", lines[-1]
    answers = [line["message"] for line in lines if line["type"] == "assistant"]
    usage = answers[-1]["usage"]
    return usage["cache_read_input_tokens"], usage["input_tokens"]


def agent_in(home: str, daemon: Daemon) -> Agent:
    return Agent("qwen", "qwen_code", Path(home), daemon)


if __name__ == "__main__":
    main(scripted=[conversation, two_folders, cancellation])
