"""GitHub Copilot CLI, `copilot -p`: its bash tool, over chat. It says its tokens in words."""

import re
import tempfile
from pathlib import Path

from tests.clients.checks import Daemon, main
from tests.clients.programs.agent import Agent, shared
from tests.clients.scenario import FAREWELL, GREETING, QUESTION, knows_the_weather

ASK = ("--allow-all-tools", "-p")
TOKENS = re.compile(r"↑ ([\d.]+)(k?).*?\(([\d.]+)(k?) cached")
ONE_QUESTION = (*ASK, GREETING)


def conversation(daemon: Daemon) -> str:
    """The second turn is a process of its own, which resumes the first. Copilot adds the tokens
    of a session up; the second request found what the first was.
    """
    with tempfile.TemporaryDirectory() as home:
        agent = agent_in(home, daemon)
        first, _ = agent.say(*ASK, GREETING)
        _, tokens = agent.say("--continue", *ASK, FAREWELL)
    assert first.strip(), tokens
    return f"{first.strip()} ({shared(*_usage(tokens), least=0.48)})"


def tool_loop(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        answer, _ = agent_in(home, daemon).say(*ASK, QUESTION)
    return knows_the_weather(answer.strip()).splitlines()[-1]


def two_folders(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        for agent in agent_in(home, daemon).in_two_folders():
            _, tokens = agent.say(*ONE_QUESTION)
    return shared(*_usage(tokens), least=0.05)


def cancellation(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        return agent_in(home, daemon).cancel(*ASK)


def _usage(text: str) -> tuple[int, int]:
    found = TOKENS.search(text)
    assert found, text
    asked, asked_unit, cached, cached_unit = found.groups()
    return _number(cached, cached_unit), _number(asked, asked_unit)


def _number(digits: str, unit: str) -> int:
    return round(float(digits) * (1000 if unit else 1))


def agent_in(home: str, daemon: Daemon) -> Agent:
    return Agent("copilot", "copilot", Path(home), daemon)


if __name__ == "__main__":
    main(scripted=[conversation, tool_loop, two_folders, cancellation])
