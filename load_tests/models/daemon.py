"""A daemon with several models, and what its engines' processes take."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from load_tests.processes import free_port, running

ENGINE = "engine.remote"
"""In the command line of a model's process."""


@dataclass(frozen=True, slots=True)
class Daemon:
    url: str
    pid: int

    def engines(self) -> list[psutil.Process]:
        """The processes of the models that are loaded or being loaded, the oldest first."""
        found = []
        for child in psutil.Process(self.pid).children():
            try:
                if ENGINE in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
            except psutil.NoSuchProcess:
                continue
        return sorted(found, key=lambda child: child.create_time())

    def resident_bytes(self) -> int:
        """Of all engines' processes, and of what they have started themselves."""
        total = 0
        for engine in self.engines():
            try:
                family = [engine, *engine.children(recursive=True)]
                total += sum(process.memory_info().rss for process in family)
            except psutil.NoSuchProcess:
                continue
        return total

    def models(self) -> dict[str, dict[str, Any]]:
        """By name, as /admin/models has them."""
        found = httpx.get(f"{self.url}/admin/models", timeout=60).json()["models"]
        return {model["id"]: model for model in found}


@contextmanager
def served(models: Sequence[dict[str, Any]], folder: Path, **settings: Any) -> Iterator[Daemon]:
    """A daemon with these entries of `models`, and these settings for all of them."""
    port = free_port()
    file = folder / "models.yaml"
    file.write_text(yaml.safe_dump({"models": list(models), "port": port, **settings}))
    command = [sys.executable, "-m", "rootstock_serve", "serve", "--config", str(file)]
    url = f"http://127.0.0.1:{port}"
    with running(command, f"{url}/health", folder / "daemon.log") as process:
        yield Daemon(url, process.pid)


def chat(model: str, words: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """The body of a request."""
    messages = [{"role": "user", "content": words}]
    return {"model": model, "messages": messages, "max_tokens": max_tokens, **more}
