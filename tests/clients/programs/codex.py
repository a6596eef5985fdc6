"""Codex, `codex exec`: its shell tool, over Responses."""

from typing import Any

from tests.clients.checks import Daemon
from tests.clients.programs.agent import Program
from tests.clients.scenario import GREETING, UNKNOWN


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


def errors(daemon: Daemon) -> str:
    *_, last = PROGRAM.once(daemon, *PROGRAM.ask, "-m", UNKNOWN, GREETING)
    assert last["type"] == "turn.failed", last
    assert UNKNOWN in last["error"]["message"], last
    return str(last["error"]["message"])


if __name__ == "__main__":
    PROGRAM.main(errors)
