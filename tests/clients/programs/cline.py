"""Cline, `cline --json`: its run_commands tool, over chat."""

import tempfile
from pathlib import Path
from typing import Any

from tests.clients.checks import Daemon, main
from tests.clients.programs.agent import Agent, shared
from tests.clients.scenario import GREETING, QUESTION, knows_the_weather

ASK = ("--json",)
ALONE = {"CLINE_SESSION_BACKEND_MODE": "local"}  # else a process of its own outlives the session
ONE_QUESTION = (*ASK, GREETING)


def answer(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        return str(_result(agent_in(home, daemon).run(*ASK, GREETING))["text"])


def tool_loop(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        result = _result(agent_in(home, daemon).run(*ASK, QUESTION))
    assert result["iterations"] == 2, result
    return knows_the_weather(result["text"])


def two_folders(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        for agent in agent_in(home, daemon).in_two_folders():
            result = _result(agent.run(*ONE_QUESTION))
    return shared(result["usage"]["cacheReadTokens"], result["usage"]["inputTokens"], least=0.03)


def cancellation(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        return agent_in(home, daemon).cancel(*ASK)


def _result(lines: list[Any]) -> Any:
    (result,) = [line for line in lines if line["type"] == "run_result"]
    return result


def agent_in(home: str, daemon: Daemon) -> Agent:
    return Agent("cline", "cline", Path(home), daemon, ALONE)


if __name__ == "__main__":
    main(scripted=[answer, tool_loop, two_folders, cancellation])
