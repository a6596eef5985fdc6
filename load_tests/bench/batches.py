"""Lines of a batch that share a system prompt, compared with the same chats of mlx_lm.server; and
the gaps of chats with a batch next to them and without.

    python -m load_tests.bench.batches [--lines 500] [--peer-lines 60] [--at-once 8] [--rounds 3]

All are asked of SmolLM2. The system prompt is the first 1,000 tokens of a page of docs/, each line
has a question of its own and at most 16 tokens of an answer. The peer's chats are fewer, and their
time is scaled. The chats whose gaps are measured are four streams at a time of 100 tokens each.
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import psutil
import typer

from engine.mlx_backend.loading.locate import find_checkpoint
from load_tests.client import Target
from load_tests.peers.catalogue import mlx_lm, rootstock, serving
from load_tests.report import Table
from load_tests.terminal import show_figures

TEXT = Path(__file__).parents[2] / "docs/internals/scheduler.md"
SYSTEM_CHARACTERS = 3_800  # about 1,000 tokens of SmolLM2
ANSWER_TOKENS = 16
CHATS, CHAT_TOKENS = 4, 100
ANSWER_SECONDS = 1800.0
POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds of each round, and the machine's load when it began."""

    name: str
    seconds: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)

    def add(self, seconds: float, load: float) -> None:
        self.seconds.append(seconds)
        self.loads.append(load)
        typer.echo(f"{self.name}: {seconds:.3f} s, load {load:.1f}", err=True)


def body(model: str, system: str, number: int) -> dict[str, Any]:
    """The request of a line."""
    said = [
        {"role": "system", "content": system},
        {"role": "user", "content": f"What does it say of the number {number}?"},
    ]
    return {
        "model": model,
        "messages": said,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
    }


def system_of(round_: int) -> str:
    """The system prompt, which begins otherwise in each round: no cache has it."""
    return f"Round {round_}.\n\n{TEXT.read_text('utf-8')[:SYSTEM_CHARACTERS]}"


def start_batch(http: httpx.Client, target: Target, system: str, n_lines: int) -> str:
    """Create a batch of chats; its id."""
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": body(target.model, system, number),
        }
        for number in range(n_lines)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    made = http.post(
        f"{target.base_url}/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", text)}
    )
    created = http.post(
        f"{target.base_url}/batches",
        json={
            "input_file_id": made.raise_for_status().json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        },
    )
    return str(created.raise_for_status().json()["id"])


def end_batch(http: httpx.Client, target: Target, id: str) -> dict[str, Any]:
    """Wait for the end of a batch."""
    while True:
        batch: dict[str, Any] = http.get(f"{target.base_url}/batches/{id}").json()
        if batch["status"] in {"completed", "cancelled"}:
            assert not batch["request_counts"]["failed"], batch
            return batch
        time.sleep(POLL_SECONDS)


def batch_seconds(http: httpx.Client, target: Target, round_: int, n_lines: int) -> float:
    began = time.perf_counter()
    end_batch(http, target, start_batch(http, target, system_of(round_), n_lines))
    return time.perf_counter() - began


def chats_seconds(
    http: httpx.Client, target: Target, at_once: int, round_: int, n_lines: int
) -> float:
    """How many seconds chats with the work of this many lines take."""

    def ask(number: int) -> None:
        asked = body(target.model, system_of(round_), number)
        http.post(f"{target.base_url}/chat/completions", json=asked).raise_for_status()

    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as threads:
        for _ in threads.map(ask, range(n_lines)):
            pass
    return time.perf_counter() - began


def worst_gap(http: httpx.Client, target: Target, round_: int) -> float:
    """The longest time between two tokens of a chat, of four that run at the same time."""

    def stream(number: int) -> float:
        asked = body(target.model, f"Chat {round_}.{number}.", number) | {
            "stream": True,
            "max_tokens": CHAT_TOKENS,
            "ignore_eos": True,
        }
        url, times = f"{target.base_url}/chat/completions", list[float]()
        with http.stream("POST", url, json=asked) as answer:
            for line in answer.raise_for_status().iter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
        return max(end - start for start, end in pairwise(times[1:]))

    with ThreadPoolExecutor(CHATS) as threads:
        return max(threads.map(stream, range(CHATS)))


@contextmanager
def batch_running(http: httpx.Client, target: Target, n_lines: int) -> Iterator[None]:
    """A batch that runs next to the block, and is cancelled after it."""
    id = start_batch(http, target, system_of(-1), n_lines)
    try:
        while not http.get(f"{target.base_url}/batches/{id}").json()["request_counts"]["completed"]:
            time.sleep(POLL_SECONDS)
        yield
        counts = http.get(f"{target.base_url}/batches/{id}").json()["request_counts"]
        typer.echo(f"{counts['completed']} of {n_lines} lines answered meanwhile", err=True)
    finally:
        http.post(f"{target.base_url}/batches/{id}/cancel")
        end_batch(http, target, id)


def main(
    lines: Annotated[int, typer.Option(help="Of a batch.")] = 500,
    peer_lines: Annotated[int, typer.Option(help="Chats of the peer; 0: no peer.")] = 60,
    at_once: Annotated[int, typer.Option(help="Chats of the peer at a time.")] = 8,
    rounds: Annotated[int, typer.Option(help="Of each.")] = 3,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Where to write the figures.")
    ] = None,
) -> None:
    """Compare, and show the median seconds."""
    logs = Path("build/load_tests")
    alone, beside = Figures("worst gap of four chats"), Figures("the same next to a batch")
    batch, peer_chats = Figures(f"{lines} lines"), Figures(f"{lines} chats of mlx_lm.server")
    with ExitStack() as stack:
        model = find_checkpoint("smollm2", download=True)
        folder = stack.enter_context(TemporaryDirectory(prefix="batches-"))
        http = stack.enter_context(httpx.Client(timeout=ANSWER_SECONDS, trust_env=False))
        peer = rootstock("--batches", folder)
        with serving(peer, model, logs / "batches.log") as own:
            worst_gap(http, own, -1)
            for round_ in range(rounds):
                load = psutil.getloadavg()[0]
                alone.add(worst_gap(http, own, 2 * round_), load)
                with batch_running(http, own, lines):
                    load = psutil.getloadavg()[0]
                    beside.add(worst_gap(http, own, 2 * round_ + 1), load)
            for round_ in range(rounds):
                load = psutil.getloadavg()[0]
                batch.add(batch_seconds(http, own, round_, lines), load)
        if peer_lines:
            server = mlx_lm(listen_queue=100)
            with serving(server, model, logs / "batches_peer.log") as other:
                ask = partial(chats_seconds, http, other, at_once)
                for round_ in range(rounds):
                    load = psutil.getloadavg()[0]
                    peer_chats.add(ask(round_, peer_lines) * lines / peer_lines, load)
    found = [alone, beside, batch, *([peer_chats] if peer_lines else [])]
    rows = tuple(
        (
            each.name,
            *(f"{of(each.seconds):.3f}" for of in (median, min, max)),
            f"{max(each.loads):.1f}",
        )
        for each in found
    )
    columns = ("measured", "median s", "least", "greatest", "load at most")
    show_figures(Table(columns, rows), found, json_path)


if __name__ == "__main__":
    typer.run(main)
