"""GitHub Copilot CLI, `copilot -p`: its bash tool, over chat. It says its tokens in words, those
of all requests of a session together.
"""

import re
from typing import Any

from tests.clients.programs.agent import Agent, Program

TOKENS = re.compile(r"↑ ([\d.]+)(k?).*?\(([\d.]+)(k?) cached")


class Copilot(Program):
    name = environment = "copilot"
    ask = ("--allow-all-tools", "-p")
    resume = ("--continue", *ask)
    least_resumed, least_elsewhere = 0.48, 0.05  # the second request found what the first was

    def run(self, agent: Agent, *arguments: str) -> tuple[str, str]:
        return agent.say(*arguments)

    def text(self, report: Any) -> str:
        answer, _ = report
        return str(answer.strip())

    def usage(self, report: Any) -> tuple[int, int]:
        _, text = report
        found = TOKENS.search(text)
        assert found, text
        asked, asked_unit, cached, cached_unit = found.groups()
        return _number(cached, cached_unit), _number(asked, asked_unit)


def _number(digits: str, unit: str) -> int:
    return round(float(digits) * (1000 if unit else 1))


PROGRAM = Copilot()

if __name__ == "__main__":
    PROGRAM.main()
