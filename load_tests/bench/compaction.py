"""What a summary costs, and the turn after it, by this server's compaction and by those of clients.

    python -m load_tests.bench.compaction [--rounds 3] [--characters 12000]

SmolLM2 has a conversation about a text of docs/, which no round finds in a cache, by the Responses
API. It is compacted by `/v1/responses/compact`; as Codex does it, by a turn without tools that asks
for a summary; and as Claude Code does, by a turn with them. Then it goes on from the summary. The
first token of that turn is compared with that of another turn from the same summary, whose head is
cached by then.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx
import psutil
import typer

from engine.mlx_backend.loading.locate import find_checkpoint
from load_tests.client import Target
from load_tests.peers.catalogue import rootstock, serving
from load_tests.report import Table
from load_tests.terminal import show_figures

TEXT = Path(__file__).parents[2] / "docs/internals/scheduler.md"
ANSWER_SECONDS = 1800.0
ANSWER_TOKENS = 48
SETTLING_SECONDS = 1.0  # in which a head that is to be warmed reaches the engine
POLL_SECONDS = 0.05
SUM_UP = "Sum this conversation up, so that the work can go on from the summary alone."
QUESTIONS = ("What is a step?", "What is a queue?")
TOOL = {
    "type": "function",
    "name": "read_file",
    "description": "Reads a file of the project, and returns its text with numbered lines.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "first_line": {"type": "integer"}},
        "required": ["path"],
    },
}

Item = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Heard:
    """One answer, and when its first text came after it was asked for."""

    text: str
    id: str
    prompt_tokens: int
    cached_tokens: int
    first_text_seconds: float


@dataclass(frozen=True, slots=True)
class Compacted:
    """One compaction, and two turns after it."""

    name: str
    summary_tokens: int  # of the prompt of its turn
    summary_cached: int
    after: Heard
    again: Heard
    load: float

    @property
    def ratio(self) -> float:
        return self.after.first_text_seconds / self.again.first_text_seconds


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks one server for responses."""

    http: httpx.Client
    target: Target
    instructions: str

    def ask(self, items: Sequence[Item], **fields: Any) -> Heard:
        """A streamed response, with the tool unless the fields have others."""
        body = {
            "model": self.target.model,
            "instructions": self.instructions,
            "tools": [TOOL],
            "input": items,
            "temperature": 0,
            "max_output_tokens": ANSWER_TOKENS,
            "stream": True,
            **fields,
        }
        first, began, last = 0.0, time.perf_counter(), dict[str, Any]()
        url = f"{self.target.base_url}/responses"
        with self.http.stream("POST", url, json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    last = json.loads(line.removeprefix("data: "))
                    if not first and last["type"].endswith(".delta"):
                        first = time.perf_counter() - began
        made = last["response"]
        text = "".join(
            part["text"]
            for item in made["output"]
            if item["type"] == "message"
            for part in item["content"]
        )
        usage = made["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        return Heard(text, made["id"], usage["input_tokens"], cached, first)

    def wait_until_idle(self) -> None:
        """Until nothing is computed, what is warmed in the background included."""
        url = f"{self.target.base_url.removesuffix('/v1')}/load"
        time.sleep(SETTLING_SECONDS)
        while self.http.get(url).raise_for_status().json()["server_load"]:
            time.sleep(POLL_SECONDS)

    def compact(self, id: str) -> tuple[Item, int, int]:
        """The summary of a response's conversation, the tokens of its prompt, and cached ones."""
        body = {"model": self.target.model, "previous_response_id": id}
        answer = self.http.post(f"{self.target.base_url}/responses/compact", json=body)
        made = answer.raise_for_status().json()
        usage = made["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        return made["output"][0], usage["input_tokens"], cached


def user(text: str) -> Item:
    return {"role": "user", "content": text}


def by_server(asker: Asker, said: Sequence[Item], id: str) -> tuple[list[Item], int, int]:
    """The items with which the conversation goes on, and the tokens of the summary's turn."""
    item, tokens, cached = asker.compact(id)
    return [item], tokens, cached


def by_client(
    tools: Sequence[Item], asker: Asker, said: Sequence[Item], id: str
) -> tuple[list[Item], int, int]:
    """Compact as agents do: a turn of the client asks for the summary, with these tools."""
    heard = asker.ask([*said, user(SUM_UP)], tools=tools, max_output_tokens=256)
    return [user(f"Summary of what was said:\n{heard.text}")], *_tokens(heard)


def _tokens(heard: Heard) -> tuple[int, int]:
    return heard.prompt_tokens, heard.cached_tokens


Compact = Callable[[Asker, Sequence[Item], str], tuple[list[Item], int, int]]
WAYS: Mapping[str, Compact] = {
    "/v1/responses/compact": by_server,
    "as Codex, without tools": partial(by_client, ()),
    "as Claude Code": partial(by_client, (TOOL,)),
}


def compacted(name: str, asker: Asker, characters: int, number: int) -> Compacted:
    """One conversation of two turns, its summary, and what comes after when the server is idle."""
    load, text = psutil.getloadavg()[0], TEXT.read_text("utf-8")[:characters]
    said: list[Item] = [user(f"Number {number}, {name}.\n\n{text}\n\nWhat is this about?")]
    for question in ("Say more about it.", ""):
        heard = asker.ask(said)
        said.append({"role": "assistant", "content": heard.text})
        if question:
            said.append(user(question))
    head, tokens, cached = WAYS[name](asker, said, heard.id)
    asker.wait_until_idle()
    after, again = (asker.ask([*head, user(question)]) for question in QUESTIONS)
    return Compacted(name, tokens, cached, after, again, load)


def main(
    rounds: Annotated[int, typer.Option(help="Of each, in turn.")] = 3,
    characters: Annotated[int, typer.Option(help="Of the text.")] = 12_000,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Where to write the figures.")
    ] = None,
) -> None:
    """Compact, and show medians."""
    with ExitStack() as stack:
        model = find_checkpoint("smollm2", download=True)
        http = stack.enter_context(httpx.Client(timeout=ANSWER_SECONDS, trust_env=False))
        log = Path("build/load_tests/compaction.log")
        target = stack.enter_context(serving(rootstock(), model, log))
        asker = Asker(http, target, "You are a careful engineer. " * 40)
        asker.ask([user("Hello.")])
        found = list[Compacted]()
        for number in range(rounds):
            for name in WAYS:
                found.append(compacted(name, asker, characters, number))
                typer.echo(f"{name}: {found[-1].ratio:.2f}, load {found[-1].load:.1f}", err=True)
    rows = tuple(_row(name, [each for each in found if each.name == name]) for name in WAYS)
    columns = (
        *("compacted by", "tokens", "cached", "then cached", "first token s", "with cached head s"),
        *("ratio", "load at most"),
    )
    show_figures(Table(columns, rows), found, json_path)


def _row(name: str, found: Sequence[Compacted]) -> tuple[str, ...]:
    return (
        name,
        f"{median(each.summary_tokens for each in found):.0f}",
        f"{min(each.summary_cached / each.summary_tokens for each in found):.1%}",
        f"{min(each.after.cached_tokens / each.after.prompt_tokens for each in found):.1%}",
        f"{median(each.after.first_text_seconds for each in found):.3f}",
        f"{median(each.again.first_text_seconds for each in found):.3f}",
        f"{median(each.ratio for each in found):.2f}",
        f"{max(each.load for each in found):.1f}",
    )


if __name__ == "__main__":
    typer.run(main)
