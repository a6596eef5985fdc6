"""NVIDIA Dynamo's selector, which follows the KV events of two daemons."""

import json
import os
import random
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
SELECTOR = Path(__file__).with_name("dynamo_selector.py")  # run with -P: `dynamo` is not this file


class Selector:
    """Dynamo's selector in a process."""

    def __init__(self, process: subprocess.Popen[str], workers: Sequence[Worker]) -> None:
        self._process = process
        self._workers = workers
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

    def n_wrong(self, prompts: Sequence[list[int]]) -> int:
        """The overlaps in which it differs from what the daemons would find."""
        return sum(self._blocks(prompt) != self._probed(prompt) for prompt in prompts)

    def _blocks(self, prompt: list[int]) -> list[int]:
        workers = self._call(prompt)["workers"]
        found = {each["worker_id"]: each["device_blocks"] for each in workers}
        return [found[number] for number in range(len(self._workers))]

    def _probed(self, prompt: list[int]) -> list[int]:
        body = {"model": MODEL, "prompt": prompt}
        answers = [httpx.post(f"{each.url}/admin/cache/probe", json=body) for each in self._workers]
        return [len(answer.json()["block_digests"]) for answer in answers]

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
        log = Path(folder) / "daemon.log"
        kept = stack.enter_context(worker(log))
        with worker(log) as killed:
            first = stack.enter_context(_selector([kept, killed]))
            _serve((kept, killed), prompts)
            _check(first, prompts)
            second = stack.enter_context(_selector([kept, killed]))
            _check(second, prompts)
            _kill(killed)
        with worker(log, killed.url, killed.events, killed.replay):
            _serve((killed,), prompts[1 : 2 * SERVED : 4])
            _check(first, prompts)
            _check(second, prompts)
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
    for number, prompt in enumerate(prompts[: SERVED * len(workers)]):
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        url = workers[number % len(workers)].url
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()


def _check(selector: Selector, prompts: Sequence[list[int]]) -> None:
    until(lambda: selector.n_wrong(prompts[:100]), lambda n_wrong: n_wrong == 0)
    assert selector.n_wrong(prompts) == 0


def _kill(killed: Worker) -> None:
    """As a loss of power does: the engine says nothing more."""
    port = int(killed.url.rpartition(":")[2])
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "serve" in line and str(port) in line:
            for each in (*process.children(recursive=True), process):
                each.kill()


if __name__ == "__main__":
    main(globals())
