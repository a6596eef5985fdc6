"""The whole run: `python -m tests.hostile --drawn 2000 --seed 0`."""

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table

from tests.hostile.asking import is_alive, send
from tests.hostile.cases import Case, chains, completion, dear_later, named
from tests.hostile.daemons import HOSTILE, PROBE, client, daemon
from tests.hostile.drawing import Drawer
from tests.hostile.probe import Waits, probing

LIMIT_SECONDS = 1.0
AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    statuses: Counter[int]
    worst: dict[str, float]

    @property
    def passed(self) -> bool:
        return max(self.worst.values()) <= LIMIT_SECONDS


def main(
    drawn: Annotated[int, typer.Option(help="How many random grammars.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the first one.")] = 0,
) -> None:
    """Send all that is known to be hostile, and random grammars, beside a client that measures what
    it waits; print that as a table, and fail where it waits for more than a second.
    """
    with tempfile.TemporaryDirectory() as folder, daemon(Path(folder)) as living:
        rows = asyncio.run(_all(client(living, HOSTILE), client(living, PROBE), drawn, seed))
    table = Table(
        "what is sent", "200", "400", "free, s", "held, s", "stream's gap, s", "held to 1 s"
    )
    for row in rows:
        waits = [f"{row.worst[kind]:.2f}" for kind in ("free", "held", "gap")]
        counts = [str(row.statuses[status]) for status in (200, 400)]
        table.add_row(row.name, *counts, *waits, "yes" if row.passed else "no")
    Console(width=120).print(table)
    sys.exit(not all(row.passed for row in rows))


async def _all(
    hostile: httpx.AsyncClient, harmless: httpx.AsyncClient, drawn: int, seed: int
) -> list[Row]:
    rows = []
    async with hostile, harmless:
        told = await hostile.post("/tokenize", json={"prompt": "x", "add_special_tokens": False})
        (x,) = told.raise_for_status().json()["tokens"]
        groups: dict[str, Iterable[Case]] = {
            "nothing": (),
            "chains of $ref": chains(),
            "what takes long": named(),
            "what becomes dear": _dear(x),
            f"drawn, seeds {seed} to {seed + drawn - 1}": _drawn(drawn, seed),
        }
        for name, cases in groups.items():
            async with probing(harmless) as waits:
                rows.append(await _row(name, cases, hostile, waits))
            assert await is_alive(harmless), name
    return rows


async def _row(name: str, cases: Iterable[Case], http: httpx.AsyncClient, waits: Waits) -> Row:
    statuses: Counter[int] = Counter()
    left = iter(cases)
    while batch := list(islice(left, AT_ONCE)):
        statuses.update(await asyncio.gather(*(send(http, case) for case in batch)))
        for kind, seconds in waits.worst().items():
            if seconds > LIMIT_SECONDS:
                names = ", ".join(case.name for case in batch)
                print(f"{kind}: {seconds:.2f} s by now, at the latest with {names}", flush=True)
    await waits.grow()
    return Row(name, statuses, waits.worst())


def _dear(x: int) -> Iterator[Case]:
    options = {"logit_bias": {str(x): 100}, "max_tokens": 120}
    for times in range(20, 120, 4):
        text = dear_later(times)
        yield completion(f"{times} times dear", guided_grammar=text, **options)


def _drawn(n: int, seed: int) -> Iterator[Case]:
    return (Drawer(one).case() for one in range(seed, seed + n))


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
