"""Daemons that publish KV events, and vllm-router before them: what share of the prompt tokens each
policy finds in a cache. `python -m load_tests fleet`.
"""

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import typer

from load_tests.processes import free_port, running

MODEL = "rootstock-demo"
BLOCK_SIZE = 32
ROUTER = Path(__file__).parents[1] / ".clients/vllm_router/bin/vllm-router"
POLICIES = ("round_robin", "cache_aware", "consistent_hash", "kv_aware")
WORDS = ("the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "they")

CONVERSATIONS, TURNS = 7, 6  # an even number would be sticky by round robin over two daemons
AGENTS, REQUESTS = 8, 4


@dataclass(frozen=True, slots=True)
class Worker:
    """A daemon that publishes events. `pid`: of its process."""

    url: str
    events: str
    replay: str
    pid: int


@contextmanager
def worker(log: Path, url: str = "", events: str = "", replay: str = "") -> Iterator[Worker]:
    """A daemon of the embedded model, at addresses of its own or at those of an earlier one."""
    url = url or f"http://127.0.0.1:{free_port()}"
    events = events or f"tcp://127.0.0.1:{free_port()}"
    replay = replay or f"tcp://127.0.0.1:{free_port()}"
    port = url.rpartition(":")[2]
    command = [sys.executable, "-m", "rootstock_serve", "serve", "--model", MODEL, "--port", port]
    command += ["--kv-events", events, "--kv-events-replay", replay]
    command += ["--kv-cache-bytes", "64MiB", "--log-level", "warning"]
    with running(command, f"{url}/health", log) as process:
        yield Worker(url, events, replay, process.pid)


@contextmanager
def router(program: Path, policy: str, workers: Sequence[Worker], log: Path) -> Iterator[str]:
    """The URL of a vllm-router before these daemons."""
    port, metrics_port = free_port(), free_port()
    command = [str(program), "--policy", policy, "--port", str(port), "--log-level", "error"]
    command += ["--prometheus-port", str(metrics_port), "--worker-urls"]
    command += [each.url for each in workers]
    if policy == "kv_aware":
        command += ["--kv-event-block-size", str(BLOCK_SIZE), "--kv-event-model", MODEL]
        for each in workers:
            command += ["--kv-event-source", f"{each.url}={each.events}"]
            command += ["--kv-event-replay-source", f"{each.url}={each.replay}"]
    with running(command, f"http://127.0.0.1:{port}/health", log):
        yield f"http://127.0.0.1:{port}"


@dataclass(slots=True)
class Share:
    """The prompt tokens of some requests, and those of them that were cached."""

    prompt_tokens: int = 0
    cached_tokens: int = 0

    def chat(self, http: httpx.Client, messages: list[dict[str, str]], session: str) -> str:
        """Send a chat and count its tokens. Returns the answer."""
        answer = http.post(
            "/v1/chat/completions",
            json={"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 24},
            headers={"X-Session-ID": session},
        ).raise_for_status()
        usage = answer.json()["usage"]
        self.prompt_tokens += usage["prompt_tokens"]
        self.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return str(answer.json()["choices"][0]["message"]["content"])

    def __str__(self) -> str:
        return f"{self.cached_tokens / max(self.prompt_tokens, 1):.3f}"


def conversations(url: str, seed: int, share: Share) -> list[list[dict[str, str]]]:
    """Some conversations in turns, whose messages have 40 words. Returns them as they were."""
    drawn = random.Random(seed)
    held: list[list[dict[str, str]]] = [[] for _ in range(CONVERSATIONS)]
    with httpx.Client(base_url=url, timeout=120) as http:
        for _ in range(TURNS):
            for number, messages in enumerate(held):
                messages.append({"role": "user", "content": _text(drawn, 40)})
                answer = share.chat(http, messages, f"{seed}-{number}")
                messages.append({"role": "assistant", "content": answer})
    return held


def resends(url: str, held: list[list[dict[str, str]]], seed: int, share: Share) -> None:
    """The last request of each conversation once more."""
    with httpx.Client(base_url=url, timeout=120) as http:
        for number, messages in enumerate(held):
            share.chat(http, messages[:-1], f"{seed}-{number}")


def agents(url: str, seed: int, share: Share) -> None:
    """Agents at once, with one system prompt of 500 words and tasks of their own."""
    drawn = random.Random(seed)
    system = {"role": "system", "content": _text(drawn, 500)}
    tasks = [[_text(drawn, 20) for _ in range(REQUESTS)] for _ in range(AGENTS)]

    def work(number: int) -> None:
        with httpx.Client(base_url=url, timeout=120) as http:
            for task in tasks[number]:
                user = {"role": "user", "content": task}
                share.chat(http, [system, user], f"{seed}-{number}")

    with ThreadPoolExecutor(AGENTS) as threads:
        list(threads.map(work, range(AGENTS)))


def _text(drawn: random.Random, n_words: int) -> str:
    return " ".join(drawn.choices(WORDS, k=n_words))


def _served(workers: Sequence[Worker]) -> list[int]:
    """How many sequences each daemon has finished."""
    counts = []
    for each in workers:
        lines = httpx.get(f"{each.url}/metrics").text.splitlines()
        name = "rootstock_requests_finished_total{"
        counts.append(int(sum(float(line.split()[-1]) for line in lines if line.startswith(name))))
    return counts


def fleet(
    program: Annotated[
        Path, typer.Option(help="vllm-router; `make clients` installs it.")
    ] = ROUTER,
    seed: int = 0,
) -> None:
    """Compare vllm-router's policies, and one daemon alone, by what is found in caches."""
    print(
        "| policy | conversations | agents (requests per daemon) | after a restart of the router |"
    )
    print("| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        logs = Path(folder)
        workers = [stack.enter_context(worker(logs / f"daemon{n}.log")) for n in range(2)]
        for number, policy in enumerate(("", *POLICIES), seed):
            for each in workers:
                httpx.post(f"{each.url}/admin/cache/clear").raise_for_status()
            first, at_once, again = Share(), Share(), Share()
            if not policy:
                conversations(workers[0].url, number, first)
                agents(workers[0].url, number, at_once)
                print(f"| one daemon, no router | {first} | {at_once} | |")
                continue
            with router(program, policy, workers, logs / "router.log") as url:
                held = conversations(url, number, first)
                before = _served(workers)
                agents(url, number, at_once)
                n_each = [b - a for a, b in zip(before, _served(workers), strict=True)]
            with router(program, policy, workers, logs / "router.log") as url:
                resends(url, held, number, again)
            served = "/".join(map(str, n_each))
            print(f"| {policy} | {first} | {at_once} ({served}) | {again} |")
