"""`python -m load_tests router`: two daemons behind vllm-router."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

from load_tests.client import TargetError
from load_tests.conditions import observe
from load_tests.replicas import losses, sharing
from load_tests.replicas.fleet import FAILOVER
from load_tests.replicas.losses import ENDINGS, Fate, Losses
from load_tests.replicas.sharing import ALONE, POLICIES, Shared
from load_tests.report import Table
from load_tests.terminal import fail, show

STOCK = "the router's own"
OURS = "those of docs/operating.md"
SETTINGS = {STOCK: (), OURS: FAILOVER}


def router(
    *,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each policy.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 0,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
) -> None:
    """Put vllm-router in front of two daemons: what each policy finds cached, and what a replica's
    end costs. Fails if a request is lost that had not begun to stream.
    """
    conditions = observe(seed, (" ".join(("vllm-router", *FAILOVER)),), blas="the daemons'")
    try:
        shares = [
            (policy, [sharing.measure(policy, seed) for _ in range(repeat)])
            for policy in (*POLICIES, ALONE)
        ]
        ends = [
            (name, losses.measure(ending, flags))
            for name, flags in SETTINGS.items()
            for ending in ENDINGS
        ]
    except TargetError as error:
        raise typer.Exit(fail(str(error))) from error
    show(conditions, markdown, share_table(shares), loss_table(ends))
    lost = [line for name, found in ends if name == OURS for line in found.forbidden()]
    raise typer.Exit(fail("\n".join(lost)) if lost else 0)


def share_table(runs: Iterable[tuple[str, Sequence[Shared]]]) -> Table:
    """A row for each (policy, its runs): median, least and greatest."""
    columns = ("policy", "later turns' prompt tokens cached", "tokens to the busier daemon")
    return Table(columns, tuple((policy, *_share_cells(found)) for policy, found in runs))


def _share_cells(runs: Sequence[Shared]) -> tuple[str, str]:
    return _percents([run.share for run in runs]), _percents([run.busier for run in runs])


def _percents(shares: Sequence[float]) -> str:
    return f"{statistics.median(shares):.0%} ({min(shares):.0%}-{max(shares):.0%})"


def loss_table(ends: Iterable[tuple[str, Losses]]) -> Table:
    """A row for each (router's settings, what a replica's end came to)."""
    columns = ("router's settings", "a replica is", *(fate.value for fate in Fate))
    rows = (
        (name, found.ending.name, *(str(found.count(fate)) for fate in Fate))
        for name, found in ends
    )
    return Table(columns, tuple(rows))
