"""A daemon of a model that takes images, under attack."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import psutil

from tests.hostile.image_bodies import CHAT, base64_of, chat
from tests.hostile.pictures import padded
from tests.polling import WAIT_SECONDS, until
from tests.restart.living import Daemon, living
from tests.vision_checkpoints import write_vision_checkpoint

MIB = 1 << 20
STORE_BYTES = 20 * MIB + (256 << 10)
"""Little more than the largest image: one that is pinned leaves no room for such a one."""

LARGEST_BYTES = 20 * MIB
STREAM = {
    "messages": [{"role": "user", "content": "the cat sat"}],
    "temperature": 0,
    "max_tokens": 60,
    "ignore_eos": True,
    "stream": True,
}


@dataclass
class Target:
    """A daemon under attack, its folder of images, and another client's stream."""

    daemon: Daemon
    folder: Path
    http: httpx.Client
    n_streams: int = 0
    alone: str = ""

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.http.post(path, json=body)

    @property
    def n_bytes(self) -> int:
        """The memory of all of its processes."""
        total = 0
        process = psutil.Process(self.daemon.process.pid)
        for one in (process, *process.children(recursive=True)):
            try:
                total += one.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total

    def files(self) -> dict[str, int]:
        """The files of images, by their sizes; without those that are removed meanwhile."""
        found = dict[str, int]()
        for file in self.folder.glob("*/*"):
            if file.name != "lock":
                with suppress(FileNotFoundError):
                    found[file.name] = file.stat().st_size
        return found

    def stream(self) -> str:
        """The text of a stream, with its reasoning."""
        text = ""
        with self.http.stream("POST", CHAT, json=STREAM) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        delta = choice["delta"]
                        text += (delta.get("reasoning_content") or "") + (
                            delta.get("content") or ""
                        )
        return text

    @contextmanager
    def another_client(self) -> Iterator[None]:
        """Streams one answer after another while the block lasts. Each is what it is alone."""
        over = threading.Event()
        said = list[str | BaseException]()

        def ask() -> None:
            while not over.is_set():
                try:
                    said.append(self.stream())
                except BaseException as error:
                    said.append(error)
                    return

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            n_begun = len(said)
            until(lambda: len(said) > n_begun or not thread.is_alive())
            over.set()
            thread.join()
        assert set(said) == {self.alone}

    def check_that_nothing_is_left(self) -> None:
        """Files are within the limit and none is unfinished; none is pinned: an image that leaves
        no room for another is taken.
        """
        names = until(self.files, lambda files: not any(map(is_unfinished, files)))
        assert sum(names.values()) <= STORE_BYTES
        seed = int(monotonic() * 1000)
        whole = self.post(CHAT, chat(base64_of(padded(LARGEST_BYTES, seed))))
        assert whole.status_code == 200, whole.text
        until(self.files, lambda files: not any(map(is_unfinished, files)))
        assert sum(self.files().values()) <= STORE_BYTES


def is_unfinished(name: str) -> bool:
    return name.startswith(("new-", ".")) or name.endswith(".part")


@contextmanager
def attacked(folder: Path) -> Iterator[Target]:
    """A daemon with a small store of images, whose files are below `folder`."""
    checkpoint = write_vision_checkpoint("kimi_vl", folder)
    flags = ("--kv-cache-bytes", str(8 * MIB), "--image-store-bytes", str(STORE_BYTES))
    cache = folder / "cache"
    with (
        living(checkpoint, folder / "log", *flags, XDG_CACHE_HOME=str(cache)) as daemon,
        httpx.Client(base_url=daemon.url, timeout=WAIT_SECONDS, trust_env=False) as http,
    ):
        target = Target(daemon, cache / "rootstock" / "images", http)
        target.alone = target.stream()
        yield target
