"""The clients' run: `python -m tests.clients` for all, or the names of some."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Timer
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from engine.values.settings import EngineConfig
from server.settings import Settings
from tests.clients.catalogue import CLIENTS, ROOT, Client
from tests.clients.checks import REPORT
from tests.clients.scenario import ALIAS, SCRIPTED, as_json
from tests.clients.scripted import AgentEngine
from tests.contract.daemon import running
from tests.hosting import launched

DEMO = "rootstock-demo"
TIMEOUT_SECONDS = 300
NOT_INSTALLED = "`make clients` installs it; those for Node need node and npm"
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
    chosen = [CLIENTS[name] for name in clients or CLIENTS]
    console = Console()
    all_passed = True
    for model in (SCRIPTED, DEMO):
        for row in _rows(model, chosen):
            console.print(_line(row), soft_wrap=True, highlight=False)
            all_passed = all_passed and row.passed
    raise typer.Exit(not all_passed)


def _rows(model: str, clients: Sequence[Client]) -> Iterator[Row]:
    with _daemon(model) as url:
        for client in clients:
            if client.is_installed:
                yield from _run(client, model, url)
            else:
                yield Row(client.name, model, "installed", False, NOT_INSTALLED)


@contextmanager
def _daemon(model: str) -> Iterator[str]:
    """Its base URL, without /v1."""
    if model == SCRIPTED:
        with running(AgentEngine(), Settings(port=0, served_model_name=(model, ALIAS))) as url:
            yield url
    else:
        config = EngineConfig(model="", kv_cache_bytes=KV_CACHE_BYTES, pooling="last")
        engine = launched(config)
        with running(engine, Settings(port=0)) as url:
            yield url


def _run(client: Client, model: str, url: str) -> Iterator[Row]:
    """The client's script in its own environment. One that reports nothing has failed, unless all
    that it checks needs the scripted model.
    """
    output, status = _output(client, url, model)
    reported = [line for line in output.splitlines() if line.startswith(REPORT)]
    rows = [Row(client.name, model, **json.loads(line)) for line in reported]
    yield from rows
    silent = not rows and model == SCRIPTED
    if silent or (status and all(row.passed for row in rows)):
        yield Row(client.name, model, "script", False, f"exit status {status}")


def _output(client: Client, url: str, model: str) -> tuple[str, int]:
    """What the script wrote, and its exit status. What it wrote of errors goes on to ours."""
    scenario = {"SCENARIO": as_json(), "ENVIRONMENT": str(client.environment)}
    with subprocess.Popen(
        [*client.command, url, model],
        cwd=ROOT,
        env={**os.environ, **OFFLINE, **scenario},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as script:
        overdue = Timer(TIMEOUT_SECONDS, script.kill)
        overdue.start()
        output, errors = script.communicate()
        overdue.cancel()
    if script.returncode:
        sys.stderr.write(errors)
    return output, script.returncode


def _line(row: Row) -> str:
    verdict = "[green]passed[/]" if row.passed else "[bold red]failed[/]"
    where = f"{row.client:19} {row.model:15} {row.check:28}"
    return f"{where} {verdict}  {escape(row.detail)}"


if __name__ == "__main__":
    typer.run(main)
