"""Claude Code, `claude -p`: its Bash tool, over Messages."""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.clients import scenario
from tests.clients.checks import Daemon
from tests.clients.programs.agent import Program, shared
from tests.clients.scenario import DEFERRED, FAREWELL, GREETING, SEARCH, UNKNOWN

OUTPUT = ("--output-format", "stream-json", "--verbose", "--include-partial-messages")
ASK_TO_READ = ("-p", "--allowedTools", "Read", *OUTPUT)
COUNT_ROUTE = 'route="/v1/messages/count_tokens"'


class ClaudeCode(Program):
    name, environment = "claude", "claude_code"
    variables: Mapping[str, str] = {"CLAUDE_CODE_MAX_RETRIES": "0"}
    ask = ("-p", "--allowedTools", "Bash", *OUTPUT)
    resume = (*ask, "--continue")
    least_elsewhere = 0.7

    def text(self, report: Any) -> str:
        return str(_result(report)["result"])

    def usage(self, report: Any) -> tuple[int, int]:
        *_, last = _usages(report)
        return last

    def check_call(self, report: Any) -> None:
        assert _result(report)["num_turns"] == 2, report[-1]


def _result(report: Any) -> Any:
    assert report[-1]["type"] == "result", report[-1]
    return report[-1]


def _events(report: Any) -> list[Any]:
    return [line["event"] for line in report if line["type"] == "stream_event"]


def _usages(report: Any) -> Iterator[tuple[int, int]]:
    """Of each request its tokens that were cached, and all."""
    for event in _events(report):
        if event["type"] == "message_start":
            usage = event["message"]["usage"]
            cached = usage["cache_read_input_tokens"]
            yield cached, cached + usage["cache_creation_input_tokens"] + usage["input_tokens"]


PROGRAM = ClaudeCode()


def stream(daemon: Daemon) -> str:
    report = PROGRAM.once(daemon, *PROGRAM.ask, GREETING)
    events = _events(report)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    slices = [delta["text"] for delta in deltas if delta["type"] == "text_delta"]
    assert "".join(slices) == PROGRAM.text(report), slices
    return f"{len(slices)} slices of {len(events)} events"


def deferred_tool(daemon: Daemon) -> str:
    """It is fetched by ToolSearch, called, and remembered by the session that goes on; each request
    finds what the one before it was.
    """
    with tempfile.TemporaryDirectory() as home:
        agent = PROGRAM.agent_in(home, daemon)
        report = PROGRAM.run(agent, *PROGRAM.ask, SEARCH)
        resumed = PROGRAM.run(agent, *PROGRAM.resume, FAREWELL)
    starts = [event for event in _events(report) if event["type"] == "content_block_start"]
    blocks = [event["content_block"] for event in starts]
    called = [block["name"] for block in blocks if block["type"] == "tool_use"]
    assert called == ["ToolSearch", DEFERRED], called
    _, fetched, answered = _usages(report)
    later = (fetched, answered, *_usages(resumed))
    return "; ".join(shared(*usage, PROGRAM.least_resumed) for usage in later)


def picture(daemon: Daemon) -> str:
    """It reads a PNG file with its Read tool, whose result has the image."""
    with tempfile.TemporaryDirectory() as home:
        agent = PROGRAM.agent_in(home, daemon)
        file = Path(home, "picture.png")
        file.write_bytes(scenario.picture())
        report = PROGRAM.run(agent, *ASK_TO_READ, scenario.READ_PICTURE.format(path=file))
    answer = scenario.saw_the_picture(PROGRAM.text(report))
    return f"{answer} ({shared(*PROGRAM.usage(report), PROGRAM.least_resumed)})"


def count_of_tokens(daemon: Daemon) -> str:
    """`/context` counts the parts of its prompt, all at once; it hides what fails."""
    PROGRAM.once(daemon, *PROGRAM.ask, "/context")
    with urlopen(f"{daemon.root}/metrics") as answer:
        metrics = str(answer.read(), "utf-8").splitlines()
    (counted,) = [line for line in metrics if COUNT_ROUTE in line]
    assert 'status="200"' in counted, counted
    return counted


def errors(daemon: Daemon) -> str:
    result = _result(PROGRAM.once(daemon, *PROGRAM.ask, "--model", UNKNOWN, GREETING))
    assert result["is_error"], result
    assert result["api_error_status"] == 404, result
    return str(result["result"])


if __name__ == "__main__":
    PROGRAM.main(stream, deferred_tool, picture, count_of_tokens, errors)
