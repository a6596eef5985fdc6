"""The whole run: `python -m tests.hostile`. Less of it: `--share 0.05`, `--only responses`. All of
it in turns: `--part 1/60`, then `--part 2/60`...
"""

import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated

import httpx
import psutil
import typer
from rich.console import Console
from rich.table import Table

from tests.embedders import write_classifier, write_embedder
from tests.hostile.attacks import LARGEST, Attack, FieldAttack, named_attacks
from tests.hostile.cases import Case, chains, completion, dear_later, named
from tests.hostile.daemons import HOSTILE, PROBE, client, daemon, is_alive, send
from tests.hostile.drawing import Drawer
from tests.hostile.fields import fields
from tests.hostile.probe import Waits, probing
from tests.hostile.shapes import shapes
from tests.hostile.storm import Target, attacker, strike
from tests.restart.living import Daemon

LIMIT_SECONDS = 1.0
GRAMMARS_AT_ONCE = 8
TRIES = 3
"""Of an attack that makes somebody wait too long: another program may have had the processor."""

SLOW_SHARE, SUSPECT_SECONDS = 0.02, 0.5
"""Of the attacks on fields, those that take longest are tried again with six of the largest body,
and so is each that makes somebody wait that long."""

MEMORY_SECONDS, MEMORY_BYTES = 10.0, 96 << 20
"""The daemon's process is back within that time to what it had after the first attacks, and so many
bytes more: what the allocator keeps, and stored responses, of which there may be 64 MiB."""

MAX_TEXT_TOKENS = 2048
"""Of the texts that are embedded and ranked: those of the named attacks have up to 940."""

KINDS = ("free", "held", "gap", "health")


@dataclass(frozen=True, slots=True)
class Row:
    """What came of an attack, or of several."""

    name: str
    statuses: Counter[int]
    worst: dict[str, float]
    seconds: float = 0.0

    @property
    def wait_seconds(self) -> float:
        return max(self.worst.values())

    @property
    def passed(self) -> bool:
        return self.wait_seconds <= LIMIT_SECONDS


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the run, of `count`; the first is number 1."""

    number: int
    count: int

    @classmethod
    def read(cls, text: str) -> "Part":
        """Raises typer.BadParameter for what is no part."""
        match text.split("/"):
            case [number, count] if number.isdecimal() and count.isdecimal():
                if 1 <= int(number) <= int(count):
                    return cls(int(number), int(count))
        raise typer.BadParameter(f"{text} is no part, as 2/60 is")

    def of(self, attacks: Sequence[FieldAttack]) -> Sequence[FieldAttack]:
        """Those that belong to it."""
        return attacks[self.number - 1 :: self.count]


@dataclass(frozen=True, slots=True)
class Scene:
    """A daemon, the process that attacks it, and what a harmless client waits meanwhile."""

    target: Target
    pool: ProcessPoolExecutor
    waits: Waits

    async def row(self, attack: Attack) -> Row:
        """The best of some tries."""
        rows = list[Row]()
        while not rows or (not rows[-1].passed and len(rows) < TRIES):
            self.waits.begin_anew()
            began = asyncio.get_running_loop().time()
            statuses = await strike(self.pool, self.target, attack)
            seconds = asyncio.get_running_loop().time() - began
            await self.waits.grow()
            rows.append(Row(attack.name, statuses, self.waits.worst(), seconds))
        return min(rows, key=lambda row: row.wait_seconds)


def main(
    drawn: Annotated[int, typer.Option(help="How many random grammars.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the first one, and of the share.")] = 0,
    share: Annotated[float, typer.Option(help="Of the fields' shapes, drawn at random.")] = 1.0,
    only: Annotated[str, typer.Option(help="A part of the names of the fields' routes.")] = "",
    part: Annotated[
        str,
        typer.Option(
            help="As 2/60: of the fields' shapes every sixtieth, from the second on. What else is "
            "sent belongs to the first part."
        ),
    ] = "1/1",
    table: Annotated[Path | None, typer.Option(help="A file for all rows.")] = None,
) -> None:
    """Send all that is known to be hostile, costly values in every field of every route, and random
    grammars, next to a client that measures what it waits. Print that as a table, and fail where it
    waits for more than a second, and where the daemon's memory does not come back.
    """
    with tempfile.TemporaryDirectory() as folder:
        parent = Path(folder)
        models = _pooling_models(parent)
        with daemon(parent, *models) as living:
            run = _Run(living, seed, share, only, Part.read(part))
            rows = asyncio.run(run.all(drawn))
    if table is not None:
        _write(table, rows)
    _print(rows)
    for problem in run.problems:
        print(problem)
    sys.exit(bool(run.problems) or not all(row.passed for row in rows))


def _pooling_models(parent: Path) -> tuple[str, ...]:
    """The flags of an embedder and a reranker by these names."""
    flags = list[str]()
    for name, write in (("embedder", write_embedder), ("reranker", write_classifier)):
        folder = parent / f"{name}s"
        folder.mkdir()
        model, _ = write(folder)
        renamed = model.rename(folder / name)
        config = renamed / "config.json"
        longer = json.loads(config.read_text()) | {"max_position_embeddings": MAX_TEXT_TOKENS}
        config.write_text(json.dumps(longer))
        flags += ["--model", str(renamed)]
    return tuple(flags)


class _Run:
    def __init__(self, living: Daemon, seed: int, share: float, only: str, part: Part) -> None:
        self._living = living
        self._target = Target(int(living.url.rpartition(":")[2]), HOSTILE)
        self._process = psutil.Process(living.process.pid)
        self._random = random.Random(seed)
        self._seed = seed
        self._share = share
        self._only = only
        self._part = part
        self._first_bytes: int | None = None
        self.problems: list[str] = []

    async def all(self, drawn: int) -> list[Row]:
        rows = list[Row]()
        async with client(self._living, HOSTILE) as hostile, client(self._living, PROBE) as probe:
            if self._part.number == 1:
                rows += await self._grammars(hostile, probe, drawn)
            document = (await probe.get("/openapi.json")).raise_for_status().json()
            with attacker() as pool:
                if self._part.number == 1:
                    rows += await self._named(pool, probe)
                rows += await self._fields(pool, probe, document)
            assert await is_alive(probe)
        return rows

    async def _grammars(
        self, hostile: httpx.AsyncClient, probe: httpx.AsyncClient, drawn: int
    ) -> list[Row]:
        told = await hostile.post("/tokenize", json={"prompt": "x", "add_special_tokens": False})
        (x,) = told.raise_for_status().json()["tokens"]
        groups: dict[str, Iterable[Case]] = {
            "nothing": (),
            "chains of $ref": chains(),
            "what takes long": named(),
            "what becomes dear": _dear(x),
            f"drawn, seeds {self._seed} to {self._seed + drawn - 1}": _drawn(drawn, self._seed),
        }
        rows = []
        for name, cases in groups.items() if drawn else ():
            async with probing(probe) as waits:
                rows.append(await _row(name, cases, hostile, waits))
            assert await is_alive(probe), name
        return rows

    async def _named(self, pool: ProcessPoolExecutor, probe: httpx.AsyncClient) -> list[Row]:
        rows = []
        async with self._scene(pool, probe) as scene:
            for attack in named_attacks():
                rows.append(await scene.row(attack))
                print(_line(rows[-1]), flush=True)
        await self._check_memory("the named attacks")
        return rows

    async def _fields(
        self, pool: ProcessPoolExecutor, probe: httpx.AsyncClient, document: dict[str, object]
    ) -> list[Row]:
        by_route = dict[str, list[FieldAttack]]()
        attacks = [
            FieldAttack(field, shape) for field in fields(document) for shape in shapes(field)
        ]
        for attack in self._part.of(attacks):
            if self._only in attack.route and self._random.random() < self._share:
                by_route.setdefault(attack.route, []).append(attack)
        worst = list[Row]()
        for route, attacks in by_route.items():
            async with self._scene(pool, probe) as scene:
                rows = [await scene.row(attack) for attack in attacks]
                slow = sorted(range(len(rows)), key=lambda at: -rows[at].seconds)
                again = {*slow[: int(SLOW_SHARE * len(rows)) + 1]}
                again |= {at for at in slow if rows[at].wait_seconds > SUSPECT_SECONDS}
                for at in again:
                    row = await scene.row(replace(attacks[at], sizes=LARGEST))
                    rows[at] = max(rows[at], row, key=lambda one: one.wait_seconds)
            worst += rows
            last = max(rows, key=lambda row: row.wait_seconds)
            print(f"{len(rows):5} {route}: {_line(last)}", flush=True)
            await self._check_memory(route)
        return worst

    @asynccontextmanager
    async def _scene(
        self, pool: ProcessPoolExecutor, probe: httpx.AsyncClient
    ) -> AsyncIterator[Scene]:
        async with probing(probe) as waits:
            yield Scene(self._target, pool, waits)

    async def _check_memory(self, what: str) -> None:
        deadline = asyncio.get_running_loop().time() + MEMORY_SECONDS
        while (now := self._process.memory_info().rss) > self._most_bytes:
            if asyncio.get_running_loop().time() > deadline:
                self.problems.append(
                    f"memory: {now >> 20} MiB after {what}, at most {self._most_bytes >> 20}"
                )
                return
            await asyncio.sleep(0.2)

    @property
    def _most_bytes(self) -> int:
        self._first_bytes = self._first_bytes or self._process.memory_info().rss
        return self._first_bytes + MEMORY_BYTES


async def _row(name: str, cases: Iterable[Case], http: httpx.AsyncClient, waits: Waits) -> Row:
    statuses: Counter[int] = Counter()
    left = iter(cases)
    while batch := list(islice(left, GRAMMARS_AT_ONCE)):
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


def _cells(row: Row) -> list[str]:
    counts = [str(row.statuses[status]) for status in (200, 400)]
    others = sum(row.statuses.values()) - row.statuses[200] - row.statuses[400]
    waits = [f"{row.worst[kind]:.2f}" for kind in KINDS]
    return [row.name, *counts, str(others), *waits, "yes" if row.passed else "no"]


HEADS = ("what is sent", "200", "400", "others", *(f"{kind}, s" for kind in KINDS), "held to 1 s")


def _line(row: Row) -> str:
    return " | ".join([*_cells(row), f"{row.seconds:.1f} s"])


def _write(path: Path, rows: Sequence[Row]) -> None:
    lines = ["\t".join(HEADS), *("\t".join(_cells(row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")


SHOWN = 60


def _print(rows: Sequence[Row]) -> None:
    """The slowest, those that took too long first."""
    table = Table(*HEADS, title=f"the worst of {len(rows)}")
    for row in sorted(rows, key=lambda row: -row.wait_seconds)[:SHOWN]:
        table.add_row(*_cells(row))
    Console(width=160).print(table)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
