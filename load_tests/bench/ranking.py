"""What sharing saves a reranker: `python -m load_tests.bench.ranking`.

A daemon reranks with the load tests' checkpoint, by the logits of two of its words. Asked are 64
documents of 30 tokens behind 400 tokens of a query, in one request, and as many pairs of the same
lengths whose queries are all different. The two take turns; every text is new.
"""

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import typer
from rich.console import Console

from engine.mlx_backend.cpu.blas import load_blas
from load_tests.checkpoint import checkpoint
from load_tests.conditions import observe
from load_tests.lexicon import WORDS
from load_tests.processes import free_port, running
from load_tests.report import Table

DOCUMENTS, DOCUMENT_TOKENS, QUERY_TOKENS = 64, 30, 400
LIMIT_SECONDS = 600.0
TEMPLATE = (
    "{% for role in ('query', 'document') %}{% for said in messages if said['role'] == role %}"
    "{{ said['content'] }}{% endfor %}{% endfor %}"
)


def reranker(directory: Path) -> Path:
    """The checkpoint, said to be a reranker, below `directory`."""
    generator = checkpoint()
    for file in generator.iterdir():
        (directory / file.name).symlink_to(file)
    config = json.loads((generator / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": [f"{word}Ġ" for word in WORDS[:2]],  # with the space behind it
    }
    (directory / "config.json").unlink()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


class Asker:
    """Asks for scores of texts that nobody has sent before. Seconds, prompt and cached tokens."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._random = random.Random(0)

    def shared(self) -> tuple[float, int, int]:
        documents = [self._text(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
        return self._post("/v1/rerank", query=self._text(QUERY_TOKENS), documents=documents)

    def unshared(self) -> tuple[float, int, int]:
        queries = [self._text(QUERY_TOKENS) for _ in range(DOCUMENTS)]
        documents = [self._text(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
        return self._post("/v1/score", text_1=queries, text_2=documents)

    def _text(self, n_tokens: int) -> str:
        return "".join(f"{word} " for word in self._random.choices(WORDS, k=n_tokens))

    def _post(self, path: str, **body: object) -> tuple[float, int, int]:
        began = time.perf_counter()
        answer = self._http.post(path, json=body)
        seconds = time.perf_counter() - began
        answer.raise_for_status()
        usage = answer.json()["usage"]
        details = usage["prompt_tokens_details"]
        return seconds, int(usage["prompt_tokens"]), int(details["cached_tokens"])


def rounds(asker: Asker, n: int) -> Iterator[tuple[tuple[float, int, int], ...]]:
    asker.shared()  # the first steps compile, and touch memory for the first time
    for _ in range(n):
        yield asker.shared(), asker.unshared()


def main(n_rounds: int = 3) -> None:
    """Measure so many rounds of both."""
    conditions = observe(0, (), load_blas().name or "the system's")
    with tempfile.TemporaryDirectory() as scratch:
        model, port = Path(scratch, "model"), free_port()
        model.mkdir()
        command = [sys.executable, "-m", "server", "serve", "--model", str(reranker(model))]
        url = f"http://127.0.0.1:{port}"
        log = Path(scratch, "log")
        with (
            running([*command, "--port", str(port)], f"{url}/health", log),
            httpx.Client(base_url=url, timeout=LIMIT_SECONDS, trust_env=False) as http,
        ):
            taken = list(rounds(Asker(http), n_rounds))
    rows = []
    for at, name in enumerate(("one query", "64 queries")):
        seconds = statistics.median(one[at][0] for one in taken)
        times = statistics.median(one[1][0] / one[at][0] for one in taken)
        _, tokens, cached = taken[0][at]
        rows.append((name, f"{tokens:,}", f"{cached:,}", f"{seconds:.2f}", f"{times:.1f}"))
    columns = ("64 documents behind", "prompt tokens", "cached", "s", "times as fast")
    console = Console(width=100)
    console.print(Table(columns, tuple(rows)).rich())
    for line in conditions.lines():
        console.print(line, highlight=False)


if __name__ == "__main__":
    typer.run(main)
