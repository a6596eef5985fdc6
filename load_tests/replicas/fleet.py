"""Daemons on the embedded model and vllm-router in front of them, as processes.

The router has an environment of its own, which `make router` installs.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from load_tests.client import Target, TargetError
from load_tests.processes import Process, free_port, running

MODEL = "rootstock-demo"
ROUTER = Path(".peers/vllm_router/bin/vllm-router")
LOGS = Path("build/load_tests/replicas")

# A request is tried five times; by its second failure a replica must be out of the choice, or
# consistent_hash sends every try to the same dead one.
FAILOVER = (
    "--retry-max-retries", "5",
    "--cb-failure-threshold", "2",
    "--cb-timeout-duration-secs", "10",
    "--health-check-interval-secs", "2",
    "--health-failure-threshold", "1",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Replica:
    """One daemon. `url` has no /v1."""

    url: str
    process: Process

    def prompt_tokens(self) -> int:
        """Of all prompts that it was asked so far."""
        return int(self._get("/admin/cache/stats")["queried_tokens"])

    def output_tokens(self) -> list[int]:
        """Of each of its live requests: 0 for one that waits or is computing its prompt."""
        live = self._get("/admin/requests")["requests"]
        return [request["output_tokens"] for request in live]

    def _get(self, path: str) -> dict[str, Any]:
        answer = httpx.get(self.url + path, trust_env=False).raise_for_status()
        return dict(answer.json())


@contextmanager
def replicas(count: int, *flags: str, logs: Path = LOGS) -> Iterator[tuple[Replica, ...]]:
    """`count` daemons on ports of their own. Raises TargetError."""
    with ExitStack() as stack:
        yield tuple(
            stack.enter_context(_replica(logs / f"replica-{number}.log", flags))
            for number in range(count)
        )


@contextmanager
def _replica(log: Path, flags: Sequence[str]) -> Iterator[Replica]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    serve = (sys.executable, "-m", "server", "serve", "--port", str(port))
    with running((*serve, *flags), f"{url}/health", log) as process:
        yield Replica(url, process)


def urls(fleet: Sequence[Replica]) -> tuple[str, ...]:
    """As a router is told them."""
    return tuple(replica.url for replica in fleet)


@contextmanager
def routed(
    policy: str, worker_urls: Sequence[str], *flags: str, logs: Path = LOGS
) -> Iterator[Target]:
    """vllm-router in front of the replicas. Raises TargetError."""
    if not ROUTER.exists():
        raise TargetError(f"there is no {ROUTER}: `make router` installs it")
    port, metrics_port = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    command = (
        str(ROUTER),
        "--policy", policy,
        "--port", str(port),
        "--prometheus-port", str(metrics_port),
        "--worker-startup-check-interval", "1",
        *flags,
        "--worker-urls", *worker_urls,
    )  # fmt: skip
    with running(command, f"{url}/health", logs / f"router-{policy}.log"):
        yield Target(f"{url}/v1", MODEL)
