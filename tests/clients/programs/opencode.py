"""OpenCode, `opencode run`: its bash tool, over chat."""

from collections.abc import Mapping
from typing import Any

from tests.clients.checks import Daemon
from tests.clients.programs.agent import Program


class OpenCode(Program):
    name = environment = "opencode"
    variables: Mapping[str, str] = {
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "npm_config_registry": "http://127.0.0.1:9/",  # of what it installs for plugins, in vain
    }
    ask = ("run", "--format", "json")
    resume = (*ask, "--continue")

    def text(self, report: Any) -> str:
        return "".join(part["text"] for part in _parts(report, "text"))

    def usage(self, report: Any) -> tuple[int, int]:
        tokens = _parts(report, "step_finish")[-1]["tokens"]
        cached = tokens["cache"]["read"]
        return cached, cached + tokens["input"]

    def check_call(self, report: Any) -> None:
        (call,) = _parts(report, "tool_use")
        assert call["state"]["status"] == "completed", call


def _parts(report: Any, kind: str) -> list[Any]:
    return [event["part"] for event in report if event["type"] == kind]


PROGRAM = OpenCode()


def errors(daemon: Daemon) -> str:
    """A prompt longer than the context, where OpenCode counts fewer tokens."""
    *_, last = PROGRAM.once(daemon, *PROGRAM.ask, *["word " * 20_000] * 3)
    assert last["type"] == "error", last
    return str(last["error"]["data"]["message"])


if __name__ == "__main__":
    PROGRAM.main(errors)
