"""A daemon in a control group with too little memory, next to a process that grows."""

import select
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from tests.polling import until
from tests.pressure.groups import LimitedGroup, limited_group

MIB = 1 << 20
KV_BYTES = 256 * MIB
"""Of the daemon's cache, which prompts fill: what can be given back."""

USED_SHARE = 0.84
"""Of the limit, what the daemon takes before anything grows."""

HOG_BYTES_A_SECOND = 20 * MIB
START_SECONDS = 120.0
RUN_SECONDS = 120.0
CLIENTS = 4
PROMPT_TOKENS = 700
HOG = Path(__file__).with_name("hog.py")


@dataclass
class Tally:
    """How requests have ended."""

    ends: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)  # streams without an end, and other surprises


def start(group: LimitedGroup, *settings: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "rootstock_serve", "serve", "--demo", "--port", "0"]
    return subprocess.Popen(
        group.joining(*command, f"--kv-cache-bytes={KV_BYTES}", *settings),
        stderr=subprocess.PIPE,
        text=True,
    )


class Daemon:
    """A daemon in a group. Its log is read as it comes."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.log: list[str] = []
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        until(lambda: self.url or self._has_ended(), seconds=START_SECONDS)
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def _has_ended(self) -> bool:
        assert self.process.poll() is None, "".join(self.log)
        return False

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if "ready on " in line:
                self.url = line.split("ready on ")[1].strip().removesuffix("/v1")

    def guard(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/admin/models").json()["memory_guard"]
        return found

    def step(self) -> str:
        return str(self.guard()["step"])

    def close(self) -> None:
        self.http.close()
        self.process.terminate()
        self.process.wait(60)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


def body(random: Random, n_tokens: int, max_tokens: int) -> dict[str, Any]:
    """A prompt that shares nothing with others."""
    words = " ".join(str(random.randrange(10, 99)) for _ in range(n_tokens // 3))
    return {
        "messages": [{"role": "user", "content": words}],
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
    }


def answered(http: httpx.Client, request: dict[str, Any], tally: Tally) -> None:
    """Send one request, and note how it has ended."""
    with http.stream("POST", "/v1/chat/completions", json=request) as answer:
        if answer.status_code == 503:
            answer.read()
            wait_seconds = answer.headers.get("retry-after")
            tally.ends["refused"] += 1
            if not wait_seconds or "memory" not in answer.text:
                tally.broken.append(f"503 without a time or a reason: {answer.text}")
            time.sleep(0.2)
            return
        if answer.status_code != 200:
            tally.broken.append(f"{answer.status_code}: {answer.read().decode()}")
            return
        last = ""
        for line in answer.iter_lines():
            last = line or last
        if last == "data: [DONE]":
            tally.ends["whole"] += 1
        elif "memory_short" in last:
            tally.ends["ended"] += 1
        else:
            tally.broken.append(f"a stream without an end: {last[-300:]!r}")


class Crowd:
    """Clients that send one request after another until the block ends."""

    def __init__(self, url: str, seed: int) -> None:
        self.tally = Tally()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._send, args=(url, Random(seed * CLIENTS + client)))
            for client in range(CLIENTS)
        ]

    def __enter__(self) -> "Crowd":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _send(self, url: str, random: Random) -> None:
        with httpx.Client(base_url=url, timeout=RUN_SECONDS) as http:
            while not self._stopping.is_set():
                n_tokens = random.randrange(50, PROMPT_TOKENS)
                request = body(random, n_tokens, random.randrange(20, 300))
                try:
                    answered(http, request, self.tally)
                except httpx.HTTPError as error:
                    self.tally.broken.append(repr(error))


@contextmanager
def growing(group: LimitedGroup, most_bytes: int) -> Iterator["subprocess.Popen[str]"]:
    """A process in the group that takes so much memory, and gives it back at the end."""
    command = [sys.executable, str(HOG), str(most_bytes), str(HOG_BYTES_A_SECOND)]
    with subprocess.Popen(
        group.joining(*command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def fill(daemon: Daemon, seed: int) -> None:
    """Fill the cache with prompts."""
    random, tally = Random(seed), Tally()
    stats = daemon.http.get("/admin/cache/stats").json()
    while stats["blocks_free"] > stats["blocks_total"] // 20:
        answered(daemon.http, body(random, PROMPT_TOKENS, 1), tally)
        stats = daemon.http.get("/admin/cache/stats").json()
    assert not tally.broken, tally.broken


@contextmanager
def crowded(seed: int, *settings: str) -> Iterator[tuple[LimitedGroup, Daemon, int]]:
    """A daemon with a full cache in a group that has little more than it takes, and the bytes of
    the limit. Raises NoGroups.
    """
    with limited_group() as group:
        daemon = Daemon(start(group, *settings))
        try:
            with Crowd(daemon.url, seed):  # the buffers of steps with several rows count as well
                fill(daemon, seed)
            fill(daemon, seed)
            limit = int(group.group.used_bytes() / USED_SHARE)
            group.limit(limit)
            yield group, daemon, limit
        finally:
            daemon.close()


def growing_bytes(limit: int) -> int:
    """What a process takes next to a daemon with a full cache: more than there is."""
    return int(limit * (1 - USED_SHARE) + 0.4 * KV_BYTES)


def run(group: LimitedGroup, daemon: Daemon, limit: int, seed: int) -> Counter[str]:
    """Let a process grow until the group would be full without the guard, hold what it has for a
    while, and end, next to a daemon whose cache is full. Returns how requests have ended meanwhile,
    all of which had an end.
    """
    fill(daemon, seed)
    kills = group.group.kills()
    steps = set[str]()
    with Crowd(daemon.url, seed) as crowd:
        with growing(group, growing_bytes(limit)) as hog:
            deadline = time.monotonic() + RUN_SECONDS
            holds_until = None
            while holds_until is None or time.monotonic() < holds_until:
                assert time.monotonic() < deadline, (daemon.guard(), crowd.tally)
                assert hog.poll() is None, "the process that grows was ended"
                steps.add(daemon.step())
                n_used = group.group.used_bytes()
                if holds_until is None and hog_has_all(hog):
                    holds_until = time.monotonic() + 3
                assert n_used <= limit
                time.sleep(0.1)
        until(daemon.step, lambda step: step == "none", seconds=RUN_SECONDS)
    assert daemon.process.poll() is None
    assert group.group.kills() == kills, ("the kernel has ended a process", daemon.log[-20:])
    assert not crowd.tally.broken, crowd.tally.broken[:3]
    assert "prefixes" in steps, steps
    tally = Tally()
    answered(daemon.http, body(Random(seed), 100, 10), tally)
    assert tally.ends == {"whole": 1}, tally
    assert daemon.http.get("/health").json() == {"status": "ok"}
    return crowd.tally.ends


def hog_has_all(hog: "subprocess.Popen[str]") -> bool:
    """Whether the process has all that it wants."""
    assert hog.stdout is not None
    return bool(select.select([hog.stdout], [], [], 0)[0])
