"""Qwen Code, `qwen -p`, over chat. It asks a small question beside each of the user's."""

from typing import Any

from tests.clients.checks import Check
from tests.clients.programs.agent import Program


class QwenCode(Program):
    name, environment = "qwen", "qwen_code"
    ask = ("-o", "stream-json", "-p")
    resume = ("-o", "stream-json", "--continue", "-p")
    least_resumed = 0.9

    def checks(self) -> tuple[Check, ...]:
        return self.conversation, self.two_folders, self.cancellation

    def text(self, report: Any) -> str:
        return str(report[-1]["result"])

    def usage(self, report: Any) -> tuple[int, int]:
        assert report[-1]["type"] == "result", report[-1]
        answers = [line["message"] for line in report if line["type"] == "assistant"]
        usage = answers[-1]["usage"]
        return usage["cache_read_input_tokens"], usage["input_tokens"]


PROGRAM = QwenCode()

if __name__ == "__main__":
    PROGRAM.main()
