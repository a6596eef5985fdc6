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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx
import numpy as np
import typer

from engine.mlx_backend.loading.locate import find_checkpoint
from load_tests.processes import free_port, running
from load_tests.report import Table
from load_tests.terminal import show_figures

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
    """The seconds of each round."""

    name: str
    seconds: list[float]


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
    ours_seconds, peer_seconds = list[float](), list[float]()
    with running(daemon, f"{url}/health", log), peer(python, checkpoint) as other:
        other.tell(texts)
        ours(url, texts[:64])
        for _ in range(rounds):
            seconds, own = ours(url, texts)
            ours_seconds.append(seconds)
            seconds, first = other.embed()
            peer_seconds.append(seconds)
            if not np.allclose(own[: len(first)], first, atol=1e-4):
                raise typer.Exit("the vectors differ")
    found = [Times("Rootstock", ours_seconds), Times("sentence-transformers", peer_seconds)]
    rows = tuple(
        (each.name, f"{len(texts):,}", *(f"{of(each.seconds):.2f}" for of in (median, min, max)))
        for each in found
    )
    table = Table(("server", "texts", "median s", "least", "greatest"), rows)
    show_figures(table, found, json_path)


if __name__ == "__main__":
    typer.run(main)
