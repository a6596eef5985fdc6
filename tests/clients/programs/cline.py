"""Cline, `cline --json`: its run_commands tool, over chat."""

from collections.abc import Mapping
from typing import Any

from tests.clients.checks import Daemon
from tests.clients.programs.agent import Program
from tests.clients.scenario import GREETING


class Cline(Program):
    name = environment = "cline"
    variables: Mapping[str, str] = {
        "CLINE_SESSION_BACKEND_MODE": "local"
    }  # else a process outlives the session
    ask = ("--json",)
    least_resumed, least_elsewhere = 0.0, 0.03

    def text(self, report: Any) -> str:
        return str(_result(report)["text"])

    def usage(self, report: Any) -> tuple[int, int]:
        usage = _result(report)["usage"]
        return usage["cacheReadTokens"], usage["inputTokens"]

    def check_call(self, report: Any) -> None:
        assert _result(report)["iterations"] == 2, report

    def conversation(self, daemon: Daemon) -> str:
        """One turn: no flag resumes a session."""
        return self.text(self.once(daemon, *self.ask, GREETING))


def _result(report: Any) -> Any:
    (result,) = [line for line in report if line["type"] == "run_result"]
    return result


PROGRAM = Cline()

if __name__ == "__main__":
    PROGRAM.main()
