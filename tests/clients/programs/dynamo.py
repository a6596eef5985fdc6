"""NVIDIA Dynamo's selector, which follows the KV events of two daemons."""

import json
import os
import random
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import ne
from pathlib import Path
from typing import Any

import httpx
import psutil

from load_tests.fleet import BLOCK_SIZE, MODEL, Worker, worker
from tests.clients.checks import Daemon, main
from tests.clients.scenario import SCRIPTED
from tests.polling import until

PROMPTS = 1000
SERVED = 40
CLIENTS = 8  # that ask the daemons at once
SELECTOR = Path(__file__).with_name("dynamo_selector.py")  # run with -P: `dynamo` is not this file


class Selector:
    """Dynamo's selector in a process."""

    def __init__(self, process: subprocess.Popen[str], workers: Sequence[Worker]) -> None:
        self._process = process
        self._n_workers = len(workers)
        self._call(
            [
                {
                    "worker_id": number,
                    "endpoint": each.url,
                    "kv_events_endpoint": each.events,
                    "replay_endpoint": each.replay,
                    "block_size": BLOCK_SIZE,
                }
                for number, each in enumerate(workers)
            ]
        )

    def n_wrong(self, prompts: Sequence[list[int]], cached: Sequence[list[int]]) -> int:
        """For how many prompts it does not know how many blocks each daemon has."""
        return sum(map(ne, map(self._blocks, prompts), cached))

    def _blocks(self, prompt: list[int]) -> list[int]:
        workers = self._call(prompt)["workers"]
        found = {each["worker_id"]: each["device_blocks"] for each in workers}
        return [found[number] for number in range(self._n_workers)]

    def _call(self, value: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(value)}\n")
        self._process.stdin.flush()
        while not (line := self._process.stdout.readline()).startswith(("{", "null")):
            assert line, "the selector has ended"
        return json.loads(line)


def overlaps_are_those_of_the_probe(daemon: Daemon) -> str:
    """Of a selector that was there from the start, of a late one, and of both after an engine was
    killed and came back at its addresses.
    """
    if daemon.model == SCRIPTED:
        return "with the demo model only"
    prompts = list(_prompts())
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        logs = Path(folder)
        kept = stack.enter_context(worker(logs / "kept.log"))
        with worker(logs / "killed.log") as killed:
            both = kept, killed
            first = stack.enter_context(_selector(both))
            _serve(both, prompts)
            _check([first], both, prompts)
            second = stack.enter_context(_selector(both))
            _check([second], both, prompts)
            _kill(killed.pid)
        with worker(logs / "again.log", killed.url, killed.events, killed.replay) as again:
            _serve([again], prompts[1 : 2 * SERVED : 4])
            _check([first, second], (kept, again), prompts)
    return f"{PROMPTS} prompts, two daemons"


@contextmanager
def _selector(workers: Sequence[Worker]) -> Iterator[Selector]:
    python = Path(os.environ["ENVIRONMENT"]) / "bin/python"
    with subprocess.Popen(
        [str(python), "-P", str(SELECTOR)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Selector(process, workers)
        process.kill()


def _prompts() -> Iterator[list[int]]:
    """Prompts that share prefixes. None ends with a block, of which the last token is computed."""
    drawn, earlier = random.Random(0), [[1]]
    for _ in range(PROMPTS):
        like = drawn.choice(earlier)
        prompt = like[: drawn.randint(0, len(like))] + drawn.choices(range(9), k=70)
        prompt = prompt[:300]
        prompt += [0] * (len(prompt) % BLOCK_SIZE == 0)
        earlier.append(prompt)
        yield prompt


def _serve(workers: Sequence[Worker], prompts: Sequence[list[int]]) -> None:
    with httpx.Client(timeout=60) as http:
        for number, prompt in enumerate(prompts[: SERVED * len(workers)]):
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
            url = workers[number % len(workers)].url
            http.post(f"{url}/v1/completions", json=body).raise_for_status()


def _check(
    selectors: Sequence[Selector], workers: Sequence[Worker], prompts: Sequence[list[int]]
) -> None:
    """Events may still be on their way, so it is looked at again until they have arrived."""
    cached = _cached(workers, prompts)
    for selector in selectors:
        until(partial(selector.n_wrong, prompts, cached), lambda n_wrong: n_wrong == 0)


def _cached(workers: Sequence[Worker], prompts: Sequence[list[int]]) -> list[list[int]]:
    """How many blocks of each prompt each daemon has cached, as it says itself."""
    with httpx.Client(timeout=60) as http, ThreadPoolExecutor(CLIENTS) as threads:

        def n_blocks(prompt: list[int]) -> list[int]:
            body = {"model": MODEL, "prompt": prompt}
            answers = (http.post(f"{each.url}/admin/cache/probe", json=body) for each in workers)
            return [len(each.raise_for_status().json()["block_digests"]) for each in answers]

        return list(threads.map(n_blocks, prompts))


def _kill(pid: int) -> None:
    """As a loss of power does: the engine says nothing more."""
    process = psutil.Process(pid)
    for each in (*process.children(recursive=True), process):
        each.kill()


if __name__ == "__main__":
    main(globals())
