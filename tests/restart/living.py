"""Daemons as processes of their own, and what their directory takes of the disk."""

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from load_tests.processes import Process, free_port, running
from measuring.random_checkpoint import tiny_tokenizer
from tests.checkpoints import FAMILIES, write_family
from tests.polling import until
from tests.restart.asking import PATIENCE

MIB = 1 << 20
LIMIT_BYTES = 16 * MIB  # the least there can be: extents are evicted all the time
KV_BYTES = 16 * MIB  # less than a load has, so that memory evicts, too
SAMPLE_SECONDS = 0.005
SERVE = ("-m", "server", "serve")


@dataclass(slots=True)
class Daemon:
    """One life. `url` has no /v1."""

    url: str
    process: Process
    is_killed: bool = False

    def kill(self) -> None:
        self.is_killed = True
        self.process.kill()
        self.process.wait()

    def disk(self) -> dict[str, Any]:
        """Its figures of the disk cache."""
        found = httpx.get(f"{self.url}/admin/cache/stats", timeout=60, trust_env=False)
        return dict(found.raise_for_status().json()["disk"])

    def wait_for_disk(self, n_bytes: int) -> None:
        """Until so much has been written."""
        until(self.disk, lambda disk: disk["written_bytes"] >= n_bytes, PATIENCE)

    def clear_memory(self) -> None:
        url = f"{self.url}/admin/cache/clear?tiers=memory"
        httpx.post(url, timeout=60, trust_env=False).raise_for_status()


@contextmanager
def living(
    model: Path, log: Path, *flags: str, program: Sequence[str] = SERVE, **variables: str
) -> Iterator[Daemon]:
    """Until the context ends: then it is stopped, if nobody has killed it. Raises TargetError."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = (sys.executable, *program, "--model", str(model), "--port", str(port), *flags)
    with running(command, f"{url}/health", log, PATIENCE, variables) as process:
        yield Daemon(url, process)


def disk_flags(
    directory: Path,
    limit_bytes: int = LIMIT_BYTES,
    write: str = "selective",
    kv_bytes: int = KV_BYTES,
) -> tuple[str, ...]:
    flags = {
        "kv-cache-bytes": kv_bytes,
        "disk-cache": directory,
        "disk-cache-bytes": limit_bytes,
        "disk-cache-write": write,
    }
    return tuple(part for name, value in flags.items() for part in (f"--{name}", str(value)))


def checkpoint(family: str, parent: Path, seed: int = 0) -> Path:
    """A tiny one with room for long prompts, windows longer than a block, much KV, and no token
    that its tokenizer does not know.
    """
    found, n_tokens = FAMILIES[family], tiny_tokenizer().get_vocab_size()
    more = {"max_position_embeddings": 8192, "vocab_size": n_tokens}
    if "sliding_window" in found.config:
        more["sliding_window"] = 200
    if "num_key_value_heads" in found.config and "head_dim" in found.config:
        more["head_dim"] = 64
    return write_family(replace(found, config={**found.config, **more}), parent, seed)


def du(folder: Path) -> int:
    """Bytes of disk, as the program of that name counts them."""
    total = 0
    for parent, _, names in os.walk(folder):
        for path in (parent, *(os.path.join(parent, name) for name in names)):
            with suppress(FileNotFoundError):  # removed while we look
                total += os.lstat(path).st_blocks * 512
    return total


class DiskWatch:
    """Looks at a directory every few milliseconds, from a thread of its own."""

    def __init__(self, directory: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.most_bytes = self.samples = 0

    def __enter__(self) -> "DiskWatch":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()
        if error is None:
            assert self.most_bytes <= self._limit_bytes, f"du was {self.most_bytes}"

    def _watch(self) -> None:
        while not self._is_over.wait(SAMPLE_SECONDS):
            self.most_bytes = max(self.most_bytes, du(self._directory))
            self.samples += 1
