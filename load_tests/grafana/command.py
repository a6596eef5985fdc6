"""`python -m load_tests grafana`: whether every panel and every alert of configs/ has data."""

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from load_tests.client import Target, TargetError
from load_tests.grafana import disk
from load_tests.grafana.dashboard import Query, choices, queries, read
from load_tests.grafana.prometheus import (
    RATE_INTERVAL,
    SCRAPE_SECONDS,
    Prometheus,
    Rule,
    installed,
    scraping,
)
from load_tests.grafana.traffic import FLAGS, MODEL, drive
from load_tests.processes import free_port, running
from load_tests.report import Table
from load_tests.terminal import fail

MAY_BE_ZERO = "rootstock_preemptions_total"
"""Admission mostly keeps sequences from being sent back, under this load always."""

LOG = Path("build/load_tests/grafana.log")
SETTLE_SECONDS = 5 * SCRAPE_SECONDS


def grafana(*, seed: Annotated[int, typer.Option(help="Of the texts.")] = 0) -> None:
    """Let a Prometheus scrape a daemon under load, and ask it all that the dashboard and the alerts
    of configs/ ask. Fails with the panels that stay empty.
    """
    program = installed()
    if program is None:
        print("skipped: there is no prometheus on the PATH (Debian has a package of that name)")
        return
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    serve = (sys.executable, "-m", "server", "serve", "--port", str(port), *FLAGS)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            running((*serve, *disk.flags(Path(folder))), f"{url}/health", LOG),
            scraping(program, url.removeprefix("http://")) as prometheus,
        ):
            since = time.time()
            asyncio.run(drive(Target(f"{url}/v1", MODEL), Path(folder), seed))
            time.sleep(SETTLE_SECONDS)
            found = answers(prometheus, since, time.time())
            problems = [*empty(found), *unfilled(prometheus), *unhealthy(prometheus.rules())]
    except TargetError as error:
        raise typer.Exit(fail(str(error))) from error
    Console().print(table(found).rich())
    raise typer.Exit(fail("\n".join(problems)) if problems else 0)


Found = Sequence[tuple[Query, Sequence[float]]]


def answers(prometheus: Prometheus, since: float, until: float) -> Found:
    """Every query of the dashboard, and the values that it has between those times."""
    asked = queries(read(), RATE_INTERVAL)
    return [(query, prometheus.values(query.expression, since, until)) for query in asked]


def empty(found: Found) -> Iterator[str]:
    """The queries that show nothing and should: no numbers, or none but 0."""
    for query, values in found:
        if not any(values) and not (values and MAY_BE_ZERO in query.expression):
            state = "nothing but 0" if values else "no data"
            yield f"{query.panel}: {state}: {query.expression}"


def unfilled(prometheus: Prometheus) -> Iterator[str]:
    """The dashboard's variables that have nothing to choose from."""
    for choice in choices(read()):
        if not prometheus.label_values(choice.label, choice.series):
            yield f"the variable {choice.variable} has no values"


def unhealthy(rules: Sequence[Rule]) -> Iterator[str]:
    """The alerts that could not be evaluated."""
    if not rules:
        yield "there are no alerts"
    for rule in rules:
        if rule.health != "ok":
            yield f"the alert {rule.name} is {rule.health}: {rule.error}"


def table(found: Found) -> Table:
    """A row for each query."""
    rows = (
        (query.panel, str(len(values)), f"{max(values):.4g}" if values else "-")
        for query, values in found
    )
    return Table(("panel", "values", "greatest"), tuple(rows))
