"""Codex, `codex exec`: its shell tool, over Responses."""

import tempfile
from dataclasses import replace
from typing import Any

from tests.clients.checks import Daemon
from tests.clients.programs.agent import Program, shared
from tests.clients.scenario import ALIAS, FAREWELL, GREETING, QUESTION, UNKNOWN, knows_the_weather


class Codex(Program):
    name = environment = "codex"
    ask = ("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    resume = (*ask, "resume", "--last")
    least_resumed = (
        0.48  # of two requests, which Codex adds up; the second found what the first was
    )
    least_elsewhere = 0.95

    def text(self, report: Any) -> str:
        items = _items(report)
        assert not [item for item in items if item["type"] == "error"], report
        (text,) = [item["text"] for item in items if item["type"] == "agent_message"]
        return str(text)

    def usage(self, report: Any) -> tuple[int, int]:
        usage = report[-1]["usage"]
        return usage["cached_input_tokens"], usage["input_tokens"]

    def check_call(self, report: Any) -> None:
        (command,) = [item for item in _items(report) if item["type"] == "command_execution"]
        assert command["exit_code"] == 0, command


def _items(report: Any) -> list[Any]:
    return [event["item"] for event in report if event["type"] == "item.completed"]


PROGRAM = Codex()


def known_model(daemon: Daemon) -> str:
    """Codex has its tools in the input then, and its shell in a tool that runs JavaScript."""
    with tempfile.TemporaryDirectory() as home:
        agent = PROGRAM.agent_in(home, replace(daemon, model=ALIAS))
        report = PROGRAM.run(agent, *PROGRAM.ask, QUESTION)
        resumed = PROGRAM.run(agent, *PROGRAM.resume, FAREWELL)
    answer = knows_the_weather(PROGRAM.text(report))
    before, after = PROGRAM.usage(report), PROGRAM.usage(resumed)
    cached, asked = (now - then for then, now in zip(before, after, strict=True))
    return f"{answer} ({shared(cached, asked, 0.95)})"


def compaction(daemon: Daemon) -> str:
    """It sums the conversation up without tools, then goes on with the summary."""
    with tempfile.TemporaryDirectory() as home:
        agent = PROGRAM.agent_in(home, daemon)
        PROGRAM.run(agent, *PROGRAM.ask, QUESTION)
        resumed = PROGRAM.run(agent, *PROGRAM.ask, *COMPACTS, "resume", "--last", FAREWELL)
    answer = knows_the_weather(PROGRAM.text(resumed))
    prompts = daemon.prompts("/v1/responses")
    (_, last), (cached, asked) = prompts[:2]
    assert last < asked, prompts
    return f"{answer} ({shared(cached, asked, 0.95)})"


COMPACTS = ("-c", "model_auto_compact_token_limit=1000")
"""Fewer tokens than any of its prompts has."""


def errors(daemon: Daemon) -> str:
    *_, last = PROGRAM.once(daemon, *PROGRAM.ask, "-m", UNKNOWN, GREETING)
    assert last["type"] == "turn.failed", last
    assert UNKNOWN in last["error"]["message"], last
    return str(last["error"]["message"])


if __name__ == "__main__":
    PROGRAM.main(known_model, compaction, errors)
