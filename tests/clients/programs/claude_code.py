"""Claude Code, `claude -p`: its Bash tool, over Messages."""

import tempfile
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.clients.checks import Daemon, main
from tests.clients.programs.agent import Agent, shared
from tests.clients.scenario import FAREWELL, GREETING, QUESTION, UNKNOWN, knows_the_weather

COUNT_ROUTE = 'route="/v1/messages/count_tokens"'
ASK = (
    *("-p", "--allowedTools", "Bash"),
    *("--output-format", "stream-json", "--verbose", "--include-partial-messages"),
)
ONE_QUESTION = (*ASK, GREETING)


def conversation(daemon: Daemon) -> str:
    """The second turn is a process of its own, which resumes the first."""
    with tempfile.TemporaryDirectory() as home:
        agent = agent_in(home, daemon)
        first = _result(agent.run(*ASK, GREETING))
        cached = _cached(agent.run(*ASK, "--continue", FAREWELL))
    return f"{first['result']} ({cached})"


def stream(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        lines = agent_in(home, daemon).run(*ASK, GREETING)
    events = _events(lines)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    slices = [delta["text"] for delta in deltas if delta["type"] == "text_delta"]
    assert "".join(slices) == _result(lines)["result"], slices
    return f"{len(slices)} slices of {len(events)} events"


def tool_loop(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        lines = agent_in(home, daemon).run(*ASK, QUESTION)
    assert _result(lines)["num_turns"] == 2, lines[-1]
    return f"{knows_the_weather(_result(lines)['result'])} ({_cached(lines)})"


def two_folders(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        for agent in agent_in(home, daemon).in_two_folders():
            lines = agent.run(*ONE_QUESTION)
    return shared(*_usage(lines), least=0.7)


def count_of_tokens(daemon: Daemon) -> str:
    """`/context` counts the parts of its prompt, all at once; it hides what fails."""
    with tempfile.TemporaryDirectory() as home:
        agent_in(home, daemon).run(*ASK, "/context")
    with urlopen(f"{daemon.root}/metrics") as answer:
        metrics = str(answer.read(), "utf-8").splitlines()
    (counted,) = [line for line in metrics if COUNT_ROUTE in line]
    assert 'status="200"' in counted, counted
    return counted


def errors(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        result = _result(agent_in(home, daemon).run(*ASK, "--model", UNKNOWN, GREETING))
    assert result["is_error"], result
    assert result["api_error_status"] == 404, result
    return str(result["result"])


def cancellation(daemon: Daemon) -> str:
    with tempfile.TemporaryDirectory() as home:
        return agent_in(home, daemon).cancel(*ASK)


def _result(lines: list[Any]) -> Any:
    assert lines[-1]["type"] == "result", lines[-1]
    return lines[-1]


def _events(lines: list[Any]) -> list[Any]:
    return [line["event"] for line in lines if line["type"] == "stream_event"]


def _cached(lines: list[Any]) -> str:
    """The last request found what the one before it was."""
    return shared(*_usage(lines), least=0.95)


def _usage(lines: list[Any]) -> tuple[int, int]:
    """Of the last request: its tokens that were cached, and all."""
    starts = [event["message"] for event in _events(lines) if event["type"] == "message_start"]
    usage = starts[-1]["usage"]
    cached = usage["cache_read_input_tokens"]
    return cached, cached + usage["cache_creation_input_tokens"] + usage["input_tokens"]


def agent_in(home: str, daemon: Daemon) -> Agent:
    return Agent("claude", "claude_code", Path(home), daemon, {"CLAUDE_CODE_MAX_RETRIES": "0"})


if __name__ == "__main__":
    main(
        scripted=[
            conversation,
            stream,
            tool_loop,
            two_folders,
            count_of_tokens,
            errors,
            cancellation,
        ]
    )
