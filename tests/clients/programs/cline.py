"""Cline, `cline --json`: its run_commands tool, over chat."""

from collections.abc import Mapping
from typing import Any

from tests.clients.checks import Daemon, main
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


def _result(report: Any) -> Any:
    (result,) = [line for line in report if line["type"] == "run_result"]
    return result


PROGRAM = Cline()


def answer(daemon: Daemon) -> str:
    return PROGRAM.text(PROGRAM.once(daemon, *PROGRAM.ask, GREETING))


if __name__ == "__main__":
    main(scripted=[answer, PROGRAM.tool_loop, PROGRAM.two_folders, PROGRAM.cancellation])
