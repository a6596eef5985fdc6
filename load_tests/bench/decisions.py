"""A hundred questions about one text in one request, compared with one question that lists as much
as a choice, and with a hundred chats of mlx_lm.server.

    python -m load_tests.bench.decisions [--rounds 3] [--at-once 32] [--without-peer]

All are asked of SmolLM2, about the same 2,000 tokens of docs/, which no round finds in a cache. A
chat has the words of a question, and at most four tokens of an answer. One after the other
(`--at-once 1`), the peer's chats find the text in its own prompt cache; at once, they do not.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
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
TEXT_CHARACTERS = 7_600  # about 2,000 tokens of SmolLM2
ANSWER_SECONDS = 1800.0
THINGS = (
    *("the queue", "a preempted sequence", "a long prompt", "the draft model", "a pinned prefix"),
    *("the last token", "a client", "the device", "the clock", "a block"),
)
CLAIMS = (
    *("waits for others", "is never evicted", "is computed twice", "costs time", "has a limit"),
    *("shares memory with others", "is measured", "may fail", "is fair", "is saved to disk"),
)
STATEMENTS = [f"It says that {thing} {claim}." for thing, claim in product(THINGS, CLAIMS)]
ASKED = "Is this statement true of the above? Answer Yes or No."


@dataclass(frozen=True, slots=True)
class Times:
    """The seconds of each round, and the machine's load when it began."""

    name: str
    seconds: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, ask: Callable[[], int]) -> None:
        """Ask once more; `ask` returns the tokens of its prompts, as the server counts them."""
        self.loads.append(psutil.getloadavg()[0])
        began = time.perf_counter()
        self.tokens.append(ask())
        self.seconds.append(time.perf_counter() - began)
        typer.echo(f"{self.name}: {self.seconds[-1]:.2f} s, load {self.loads[-1]:.1f}", err=True)


def text_of(number: int) -> str:
    """The text, which begins otherwise for each number: no cache has it."""
    return f"Number {number}.\n\n{TEXT.read_text('utf-8')[:TEXT_CHARACTERS]}"


def decide(http: httpx.Client, target: Target, text: str, questions: Sequence[Any]) -> int:
    """Ask all questions in one request."""
    body = {"model": target.model, "input": text, "questions": questions}
    answer = http.post(f"{target.base_url}/decisions", json=body).raise_for_status().json()
    return int(answer["usage"]["input_tokens"])


def hundred() -> list[dict[str, Any]]:
    return [{"type": "predicate", "instructions": statement} for statement in STATEMENTS]


def listed() -> list[dict[str, Any]]:
    """One question with the words of all hundred in its choices."""
    choices = [
        {"value": str(at), "description": f"{statement} {ASKED}"}
        for at, statement in enumerate(STATEMENTS)
    ]
    return [{"type": "choice", "instructions": "Which one is true?", "choices": choices}]


def chat(http: httpx.Client, target: Target, at_once: int, text: str) -> int:
    """Ask a hundred chats."""

    def ask(statement: str) -> int:
        message = {"role": "user", "content": f"{text}\n\nStatement: {statement}\n\n{ASKED}"}
        body = {"model": target.model, "messages": [message], "max_tokens": 4, "temperature": 0}
        answer = http.post(f"{target.base_url}/chat/completions", json=body)
        return int(answer.raise_for_status().json()["usage"]["prompt_tokens"])

    with ThreadPoolExecutor(at_once) as threads:
        return sum(threads.map(ask, STATEMENTS))


@contextmanager
def copied(checkpoint: Path) -> Iterator[Path]:
    """A copy of the checkpoint in a folder that is gone at the end."""
    with TemporaryDirectory(prefix="decisions-") as folder:
        yield Path(shutil.copytree(checkpoint, Path(folder, checkpoint.name)))


def main(
    rounds: Annotated[int, typer.Option(help="Of each, in turn.")] = 3,
    at_once: Annotated[int, typer.Option(help="Chats of the peer at a time.")] = 1,
    with_peer: Annotated[bool, typer.Option("--with-peer/--without-peer")] = True,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Where to write the figures.")
    ] = None,
) -> None:
    """Compare, and show the median seconds."""
    logs = Path("build/load_tests")
    found = [Times("one question, a hundred choices"), Times("a hundred questions")]
    with ExitStack() as stack:
        model = stack.enter_context(copied(find_checkpoint("smollm2", download=True)))
        http = stack.enter_context(httpx.Client(timeout=ANSWER_SECONDS, trust_env=False))
        own = stack.enter_context(serving(rootstock(), model, logs / "decisions.log"))
        asks: list[Callable[[str], int]] = [
            lambda text: decide(http, own, text, listed()),
            lambda text: decide(http, own, text, hundred()),
        ]
        decide(http, own, text_of(0)[:400], hundred()[:3])
        if with_peer:
            peer = stack.enter_context(
                serving(mlx_lm(listen_queue=100), model, logs / "decisions_peer.log")
            )
            found.append(Times(f"a hundred chats of mlx_lm.server, {at_once} at once"))
            asks.append(partial(chat, http, peer, at_once))
        for number in range(rounds):
            for times, ask in zip(found, asks, strict=True):
                times.add(partial(ask, text_of(number)))
    rows = tuple(
        (
            each.name,
            f"{median(each.tokens):.0f}",
            *(f"{of(each.seconds):.1f}" for of in (median, min, max)),
            f"{median(each.seconds) / median(found[1].seconds):.2f}",
            f"{max(each.loads):.1f}",
        )
        for each in found
    )
    columns = ("asked", "tokens", "median s", "least", "greatest", "of a hundred", "load at most")
    show_figures(Table(columns, rows), found, json_path)


if __name__ == "__main__":
    typer.run(main)
