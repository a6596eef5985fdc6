"""pi, `pi -p`: its bash tool, over chat."""

from collections.abc import Mapping
from typing import Any

from tests.clients.programs.agent import Program


class Pi(Program):
    name = environment = "pi"
    variables: Mapping[str, str] = {"PI_OFFLINE": "1"}
    ask = ("--mode", "json", "-p")
    resume = (*ask, "--continue")
    least_resumed = 0.9

    def text(self, report: Any) -> str:
        parts = _answer(report)["content"]
        return "".join(part["text"] for part in parts if part["type"] == "text")

    def usage(self, report: Any) -> tuple[int, int]:
        usage = _answer(report)["usage"]
        return usage["cacheRead"], usage["cacheRead"] + usage["input"]


def _answer(report: Any) -> Any:
    assert report[-1]["type"] == "agent_end", report[-1]
    return report[-1]["messages"][-1]


PROGRAM = Pi()

if __name__ == "__main__":
    PROGRAM.main()
