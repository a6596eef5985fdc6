"""The whole run: `python -m tests.hostile`. Less of it: `--share 0.05`, `--only responses`. In
turns of eight minutes, whose rows are kept in a file: `--record FILE --minutes 8`, again and again.

What is tried where:

- the named attacks, chains of references, and grammars, once each, in this run;
- every field of every route with every shape, in bodies of 1 KB to 1 MB, several fields at once;
- of each kind of field, one with every shape in bodies of 8 MB (`attacks.largest`), and what of
  these takes longest six times at once;
- what the daemon counts and keeps of a body: `python -m tests.hostile.held`.
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
from itertools import groupby, islice
from pathlib import Path
from time import monotonic
from typing import Annotated, TypeVar

import httpx
import psutil
import typer

from tests.embedders import write_classifier, write_embedder
from tests.hostile.attacks import (
    LARGEST,
    Attack,
    FieldAttack,
    JointAttack,
    field_attacks,
    largest,
    named_attacks,
)
from tests.hostile.cases import Case, chains, completion, dear_later, named
from tests.hostile.daemons import HOSTILE, PROBE, client, daemon, is_alive, send
from tests.hostile.drawing import Drawer
from tests.hostile.fields import fields
from tests.hostile.probe import Waits, probing
from tests.hostile.record import LIMIT_SECONDS, Record, Row
from tests.hostile.storm import Target, attacker, strike
from tests.restart.living import Daemon

SomeAttack = TypeVar("SomeAttack", bound=Attack)

GRAMMARS_AT_ONCE = 8
TRIES = 3
"""Of an attack that makes somebody wait too long: another program may have had the processor."""

AT_ONCE = 6
"""Attacks on fields that are sent together. Where somebody waits for SUSPECT_SECONDS, each is sent
alone."""

SLOW_SHARE, SUSPECT_SECONDS = 0.02, 0.5
"""Of the attacks with the largest bodies, those that take longest are tried with six at once, and
so is each that makes somebody wait that long."""

MEMORY_SECONDS, MEMORY_BYTES = 10.0, 96 << 20
"""The daemon's process is back within that time to what it had after the first attacks, and so many
bytes more: what the allocator keeps, and stored responses, of which there may be 64 MiB."""

CHECKED = 20
"""The number of attacks with large bodies after which the daemon's memory is checked."""

MAX_TEXT_TOKENS = 2048
"""Of the texts that are embedded and ranked: those of the named attacks have up to 940."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A daemon, the process that attacks it, and what a harmless client waits meanwhile."""

    target: Target
    pool: ProcessPoolExecutor
    waits: Waits

    async def row(self, attack: Attack) -> Row:
        """The best of some tries."""
        row, _ = await self._tried(attack)
        return row

    async def rows(self, attacks: Sequence[FieldAttack]) -> list[Row]:
        """Of attacks that are sent together or, where that makes somebody wait, each alone."""
        if len(attacks) == 1:
            return [await self.row(attacks[0])]
        together = JointAttack(tuple(attacks))
        row, statuses = await self._tried(together)
        if row.wait_seconds > SUSPECT_SECONDS:
            found = [await self.row(attack) for attack in attacks]
            return found if row.passed else [row, *found]
        left = iter(statuses)
        seconds = row.seconds / len(attacks)
        return [
            Row(one.name, Counter(islice(left, len(one.sizes))), row.worst, seconds)
            for one in attacks
        ]

    async def _tried(self, attack: Attack) -> tuple[Row, Sequence[int]]:
        found = list[tuple[Row, Sequence[int]]]()
        while not found or (not found[-1][0].passed and len(found) < TRIES):
            self.waits.begin_anew()
            began = monotonic()
            statuses = await strike(self.pool, self.target, attack)
            seconds = monotonic() - began
            await self.waits.grow()
            row = Row(attack.name, Counter(statuses), self.waits.worst(), seconds)
            found.append((row, statuses))
        return min(found, key=lambda one: one[0].wait_seconds)


def main(
    drawn: Annotated[int, typer.Option(help="How many random grammars.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the first one, and of the share.")] = 0,
    share: Annotated[float, typer.Option(help="Of the fields' shapes, drawn at random.")] = 1.0,
    only: Annotated[str, typer.Option(help="A part of the names of the fields' routes.")] = "",
    record: Annotated[
        Path | None,
        typer.Option(help="A file for all rows. What it has already is not sent again."),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Begin nothing after that time.")] = 1e9,
) -> None:
    """Send all that is known to be hostile, costly values in every field of every route, and random
    grammars, next to a client that measures what it waits. Print that as a table, and fail where it
    waits for more than a second, and where the daemon's memory does not come back.
    """
    ends = monotonic() + 60 * minutes
    rows = Record.read(record)
    with tempfile.TemporaryDirectory() as folder:
        parent = Path(folder)
        models = _pooling_models(parent)
        with daemon(parent, *models) as living:
            run = _Run(living, rows, seed, share, only, ends)
            asyncio.run(run.all(drawn))
    rows.print()
    for problem in (*run.problems, *run.left):
        print(problem)
    sys.exit(bool(run.problems) or bool(rows.failed()))


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
    def __init__(
        self, living: Daemon, record: Record, seed: int, share: float, only: str, ends: float
    ) -> None:
        self._living = living
        self._target = Target(int(living.url.rpartition(":")[2]), HOSTILE)
        self._process = psutil.Process(living.process.pid)
        self._record = record
        self._random = random.Random(seed)
        self._seed = seed
        self._share = share
        self._only = only
        self._ends = ends
        self._first_bytes: int | None = None
        self.problems: list[str] = []
        self.left: list[str] = []
        """What has not been sent, in words."""

    @property
    def _is_over(self) -> bool:
        return monotonic() > self._ends

    async def all(self, drawn: int) -> None:
        async with client(self._living, HOSTILE) as hostile, client(self._living, PROBE) as probe:
            await self._grammars(hostile, probe, drawn)
            document = (await probe.get("/openapi.json")).raise_for_status().json()
            attacks = [
                one
                for one in field_attacks(fields(document))
                if self._only in one.route and self._random.random() < self._share
            ]
            with attacker() as pool:
                async with self._scene(pool, probe) as scene:
                    await self._fields(attacks, scene)
                    await self._each("the named attacks", named_attacks(), scene)
                    await self._each("8 MB", largest(attacks), scene)
                    slowest = self._slowest(largest(attacks))
                    await self._each("six times 8 MB", slowest, scene)
            assert await is_alive(probe)

    def _add(self, row: Row) -> None:
        self._record.add(row)
        if row.wait_seconds > SUSPECT_SECONDS:
            print(row, flush=True)

    async def _grammars(
        self, hostile: httpx.AsyncClient, probe: httpx.AsyncClient, drawn: int
    ) -> None:
        told = await hostile.post("/tokenize", json={"prompt": "x", "add_special_tokens": False})
        (x,) = told.raise_for_status().json()["tokens"]
        groups: dict[str, Iterable[Case]] = {
            "nothing": (),
            "chains of $ref": chains(),
            "what takes long": named(),
            "what becomes dear": _dear(x),
            f"drawn, seeds {self._seed} to {self._seed + drawn - 1}": _drawn(drawn, self._seed),
        }
        for name, cases in groups.items() if drawn else ():
            if self._record.has(name) or self._is_over:
                continue
            async with probing(probe) as waits:
                self._add(await _row(name, cases, hostile, waits))
            assert await is_alive(probe), name

    async def _each(self, what: str, attacks: Iterable[Attack], scene: Scene) -> None:
        """One attack after another."""
        waiting = self._waiting(attacks)
        n_made = 0
        for attack in waiting:
            if self._is_over:
                break
            self._add(await scene.row(attack))
            n_made += 1
            if n_made % CHECKED == 0:
                await self._check_memory(attack.name)
        self._note(what, len(waiting) - n_made)
        if n_made:
            await self._check_memory(what)

    async def _fields(self, attacks: Sequence[FieldAttack], scene: Scene) -> None:
        """Several attacks on fields of a route at once."""
        waiting = self._waiting(attacks)
        n_made = 0
        for (_, route), of_route in groupby(waiting, lambda one: (one.method, one.route)):
            left = iter(of_route)
            while not self._is_over and (some := list(islice(left, AT_ONCE))):
                for row in await scene.rows(some):
                    self._add(row)
                n_made += len(some)
            if self._is_over:
                break
            print(f"{n_made:6} of {len(waiting)}, the last to {route}", flush=True)
            await self._check_memory(route)
        self._note("fields and shapes", len(waiting) - n_made)

    def _waiting(self, attacks: Iterable[SomeAttack]) -> list[SomeAttack]:
        """Those that were not made yet, and after them those that made somebody wait too long."""
        found = [one for one in attacks if not self._record.has(one.name)]
        return sorted(found, key=lambda one: one.name in self._record.rows)

    def _note(self, what: str, n_left: int) -> None:
        if n_left:
            self.left.append(f"not sent yet: {n_left} of {what}")

    def _slowest(self, attacks: Sequence[FieldAttack]) -> list[FieldAttack]:
        """Those of which more is to be sent at once, if all have been sent once."""
        rows = self._record.rows
        if any(one.name not in rows for one in attacks):
            return []
        by_time = sorted(attacks, key=lambda one: -rows[one.name].seconds)
        found = by_time[: int(SLOW_SHARE * len(by_time)) + 1]
        found += [one for one in by_time if rows[one.name].wait_seconds > SUSPECT_SECONDS]
        return [replace(one, sizes=LARGEST) for one in {one.name: one for one in found}.values()]

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


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
