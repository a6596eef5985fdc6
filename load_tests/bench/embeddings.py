"""Embeddings of 1,000 short texts by the daemon, in turn with sentence-transformers on torch.

    python -m load_tests.bench.embeddings --python PEER/bin/python [--rounds 3]

PEER is an environment with sentence-transformers and torch. Both have MiniLM, the same texts and
the same cores, and take turns, round by round. The daemon is asked for all texts in one request to
`/v1/embeddings`, so its time has HTTP, tokens and JSON in it. Sentences of docs/ are the texts.
"""

import json
import re
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx
import numpy as np
import psutil
import typer

from engine.mlx_backend.loading.locate import find_checkpoint
from load_tests.processes import free_port, running
from load_tests.report import Table
from load_tests.terminal import fail, show_figures

DOCUMENTS = Path(__file__).parents[2] / "docs"
N_TEXTS = 1000
WORDS = range(4, 13)
ANSWER_SECONDS = 300.0

_PEER = """
import json, sys, time
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu")
texts = json.loads(sys.stdin.readline())
model.encode(texts[:64])
for line in sys.stdin:
    began = time.perf_counter()
    vectors = model.encode(texts)
    print(json.dumps([time.perf_counter() - began, vectors[:8].tolist()]), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Times:
    """The seconds of each round, by the clock and of processors."""

    name: str
    process_id: int
    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)

    def add(self, embed: Callable[[], tuple[float, Any]]) -> Any:
        """Have the texts embedded once more. Returns the vectors."""
        before = self._used_seconds()
        seconds, vectors = embed()
        self.seconds.append(seconds)
        self.processor_seconds.append(self._used_seconds() - before)
        used = self.processor_seconds[-1]
        typer.echo(f"{self.name}: {seconds:.2f} s, of processors {used:.2f} s", err=True)
        return vectors

    def _used_seconds(self) -> float:
        """Processor seconds of the process and of those that it has started."""
        process = psutil.Process(self.process_id)
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        return sum(each.user + each.system for each in times)


def short_texts() -> list[str]:
    """The first N_TEXTS sentences of docs/ with a number of words in WORDS, each once."""
    found = dict[str, None]()
    for file in sorted(DOCUMENTS.rglob("*.md")):
        text = re.sub(r"[`|#*>-]", " ", file.read_text("utf-8"))
        for sentence in re.split(r"(?<=[.:;,?])\s+", text):
            words = sentence.split()
            if len(words) in WORDS:
                found[" ".join(words)] = None
    return list(found)[:N_TEXTS]


def ours(url: str, texts: list[str]) -> tuple[float, Any]:
    """The seconds of one request for all texts, and their vectors."""
    began = time.perf_counter()
    body = {"input": texts, "encoding_format": "base64"}  # as openai's client asks
    answer = httpx.post(f"{url}/v1/embeddings", json=body, timeout=ANSWER_SECONDS)
    data = answer.raise_for_status().json()["data"]
    vectors = [np.frombuffer(b64decode(one["embedding"]), "<f4") for one in data]
    return time.perf_counter() - began, np.array(vectors)


class Peer:
    """sentence-transformers in a process of its own environment."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.process_id = process.pid

    def tell(self, value: object) -> None:
        """Send a line of JSON."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(value)}\n")
        self._process.stdin.flush()

    def embed(self) -> tuple[float, Any]:
        """The seconds for all texts, and the first vectors."""
        self.tell(None)
        assert self._process.stdout is not None
        seconds, vectors = json.loads(self._process.stdout.readline())
        return seconds, np.array(vectors)


@contextmanager
def peer(python: Path, checkpoint: Path) -> Iterator[Peer]:
    """sentence-transformers, until the context ends."""
    with subprocess.Popen(
        [str(python), "-c", _PEER, str(checkpoint)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Peer(process)
        finally:
            process.kill()


def main(
    python: Annotated[Path, typer.Option(help="Of an environment with sentence-transformers.")],
    rounds: Annotated[int, typer.Option(help="Of each, in turn.")] = 3,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Where to write the figures.")
    ] = None,
) -> None:
    """Compare, and show the median seconds."""
    checkpoint, texts, port = find_checkpoint("minilm", download=True), short_texts(), free_port()
    url, log = f"http://127.0.0.1:{port}", Path("build/load_tests/embeddings.log")
    daemon = [sys.executable, "-m", "server", "serve", "--model", "minilm", "--port", str(port)]
    with running(daemon, f"{url}/health", log) as server, peer(python, checkpoint) as other:
        found = [Times("Rootstock", server.pid), Times("sentence-transformers", other.process_id)]
        other.tell(texts)
        ours(url, texts[:64])
        for _ in range(rounds):
            own = found[0].add(partial(ours, url, texts))
            first = found[1].add(other.embed)
            if not np.allclose(own[: len(first)], first, atol=1e-4):
                raise typer.Exit(fail("the vectors differ"))
    rows = tuple(
        (
            each.name,
            *(f"{of(each.seconds):.2f}" for of in (median, min, max)),
            f"{median(each.processor_seconds):.2f}",
        )
        for each in found
    )
    columns = ("1,000 texts by", "median s", "least", "greatest", "median s of processors")
    table = Table(columns, rows)
    show_figures(table, found, json_path)


if __name__ == "__main__":
    typer.run(main)
