"""A conversation on one model, another model pushes it out, and the conversation goes on.

    python -m load_tests.models.swap

With the disk cache and without, which is what servers do that drop a model's KV with the model:
how much of the next turn's prompt was found, and how long its first token took. Beside it the same
turn where the model never went, and one found on disk by a model that is loaded already.
"""

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from load_tests.checkpoint import checkpoint
from load_tests.models.daemon import Daemon, served
from load_tests.report import Table

WORDS = "keku gade miju"


@dataclass(frozen=True, slots=True)
class Turn:
    first_token_seconds: float
    prompt_tokens: int
    cached_tokens: int

    @property
    def share(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def turn(daemon: Daemon, model: str, messages: list[dict[str, str]]) -> Turn:
    """Ask, and add the answer to the messages."""
    options = {"include_usage": True}
    body: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": 8}
    usage: dict[str, Any] = {}
    began, first, said = time.perf_counter(), 0.0, ""
    url = f"{daemon.url}/v1/chat/completions"
    body |= {"stream": True, "stream_options": options, "temperature": 0}
    with httpx.stream("POST", url, json=body, timeout=600) as answer:
        if answer.status_code != 200:
            raise RuntimeError(answer.read().decode())
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            usage = event.get("usage") or usage
            text = event["choices"][0]["delta"].get("content") if event["choices"] else ""
            if text and not said:
                first = time.perf_counter() - began
            said += text or ""
    messages.append({"role": "assistant", "content": said})
    found = usage["prompt_tokens_details"]["cached_tokens"]
    return Turn(first, usage["prompt_tokens"], found)


def conversation(tokens: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": " ".join([WORDS] * (tokens // 3))}]


def act(daemon: Daemon, action: str, model: str) -> float:
    """Seconds that it took."""
    began = time.perf_counter()
    path = f"{daemon.url}/admin/models/{action}"
    httpx.post(path, params={"model": model}, timeout=600).raise_for_status()
    return time.perf_counter() - began


def play(tokens: int, budget: int, folder: Path, **settings: Any) -> tuple[dict[str, Turn], float]:
    """The turns, and the seconds that loading takes."""
    sizes = {"kv_cache_bytes": 384 << 20, "step_tokens": 128, "max_running": 4}
    models: list[dict[str, Any]] = [
        {"model": str(checkpoint("agent")), "served_model_name": ["a"], **sizes},
        {"model": str(checkpoint()), "served_model_name": ["b"], "preload": False, **sizes},
    ]
    turns: dict[str, Turn] = {}
    more = {"role": "user", "content": "go on"}
    folder.mkdir(parents=True)
    with served(models, folder, memory_budget=budget, **settings) as daemon:
        talk = conversation(tokens)
        turns["first turn"] = turn(daemon, "a", talk)
        talk.append(more)
        turns["next turn"] = turn(daemon, "a", talk)
        turn(daemon, "b", [more])
        assert daemon.models()["a"]["state"] == "unloaded", "b did not push a out"
        talk.append(more)
        turns["after the swap"] = turn(daemon, "a", talk)
        act(daemon, "unload", "a")
        load_seconds = act(daemon, "load", "a")
        talk.append(more)
        turns["loaded before"] = turn(daemon, "a", talk)
    return turns, load_seconds


def main(
    tokens: int = 4000, budget_mib: Annotated[int, typer.Option(help="Too little for both.")] = 2000
) -> None:
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        kinds: dict[str, dict[str, Any]] = {
            "disk cache": {"disk_cache": str(Path(folder) / "kv")},
            "without": {},
        }
        for kind, settings in kinds.items():
            here = Path(folder) / kind.replace(" ", "-")
            turns, load_seconds = play(tokens, budget_mib << 20, here, **settings)
            rows += [_row(kind, name, each) for name, each in turns.items()]
            rows.append((kind, "loading alone", "", "", "", f"{load_seconds:.2f}"))
    columns = ("", "turn", "prompt", "found", "share", "first token, s")
    Console().print(Table(columns, tuple(rows)).rich())


def _row(kind: str, name: str, turn: Turn) -> tuple[str, ...]:
    figures = f"{turn.prompt_tokens:,}", f"{turn.cached_tokens:,}", f"{turn.share:.1%}"
    return kind, name, *figures, f"{turn.first_token_seconds:.2f}"


if __name__ == "__main__":
    typer.run(main)
