"""The clients' run: `python -m tests.clients` for all, or the names of some."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from engine.launch import launch
from engine.types import EngineConfig
from server.metrics import EngineTelemetry
from server.settings import Settings
from tests.clients.checks import REPORT
from tests.clients.scenario import SCRIPTED
from tests.clients.scripted import AgentEngine
from tests.contract.daemon import running

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".clients"
CLIENTS = ("langchain", "pydantic_ai", "instructor", "litellm")
DEMO = "rootstock-demo"
TIMEOUT_SECONDS = 300
KV_CACHE_BYTES = 16 << 20
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it asks the network as it is imported


@dataclass(frozen=True)
class Row:
    client: str
    model: str
    check: str
    passed: bool
    detail: str


def main(
    clients: Annotated[list[str] | None, typer.Argument(help="Clients; all by default.")] = None,
) -> None:
    """Let the clients of other projects use a daemon over a scripted model, then one over the
    embedded model. Their environments are made by `make clients`.
    """
    if unknown := set(clients or ()) - set(CLIENTS):
        raise typer.BadParameter(f"no such client: {', '.join(sorted(unknown))}")
    console = Console()
    all_passed = True
    for model in (SCRIPTED, DEMO):
        for row in _rows(model, clients or CLIENTS):
            console.print(_line(row), soft_wrap=True, highlight=False)
            all_passed = all_passed and row.passed
    raise typer.Exit(not all_passed)


def _rows(model: str, clients: Sequence[str]) -> Iterator[Row]:
    with _daemon(model) as url:
        for client in clients:
            yield from _run(client, model, f"{url}/v1")


@contextmanager
def _daemon(model: str) -> Iterator[str]:
    """Its base URL, without /v1."""
    telemetry = EngineTelemetry()
    if model == SCRIPTED:
        with running(AgentEngine(), Settings(port=0, served_model_name=(model,))) as url:
            yield url
    else:
        config = EngineConfig(model="", kv_cache_bytes=KV_CACHE_BYTES)
        engine = launch(config, telemetry, lambda line: None)
        with running(engine, Settings(port=0), telemetry) as url:
            yield url


def _run(client: str, model: str, base_url: str) -> Iterator[Row]:
    """The client's script in its own environment. One that reports nothing has failed."""
    python = ENVIRONMENTS / client / "bin" / "python"
    done = subprocess.run(
        [python, "-m", f"tests.clients.{client}", base_url, model],
        cwd=ROOT,
        env={**os.environ, **OFFLINE},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    reported = [line for line in done.stdout.splitlines() if line.startswith(REPORT)]
    rows = [Row(client, model, **json.loads(line)) for line in reported]
    yield from rows
    if done.returncode:
        sys.stderr.write(done.stderr)
    if not rows or (done.returncode and all(row.passed for row in rows)):
        yield Row(client, model, "script", False, f"exit status {done.returncode}")


def _line(row: Row) -> str:
    verdict = "[green]passed[/]" if row.passed else "[bold red]failed[/]"
    where = f"{row.client:12} {row.model:15} {row.check:24}"
    return f"{where} {verdict}  {escape(row.detail)}"


if __name__ == "__main__":
    typer.run(main)
