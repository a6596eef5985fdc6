"""What came of the attacks of a run, and the file that says which have been made."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

LIMIT_SECONDS = 1.0
KINDS = ("free", "held", "gap", "health")
HEADS = ("what is sent", "200", "400", "others", *(f"{kind}, s" for kind in KINDS), "seconds")
SHOWN = 60
_OTHERS = 0  # stands for all statuses but 200 and 400 in a row that was read


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

    def cells(self) -> list[str]:
        """As the columns of HEADS."""
        counts = [self.statuses[status] for status in (200, 400)]
        counts.append(self.statuses.total() - sum(counts))
        waits = [self.worst[kind] for kind in KINDS]
        return [self.name, *map(str, counts), *(f"{one:.2f}" for one in (*waits, self.seconds))]

    @classmethod
    def read(cls, cells: list[str]) -> "Row":
        name, good, bad, others, *waits, seconds = cells
        statuses = Counter({200: int(good), 400: int(bad), _OTHERS: int(others)})
        return cls(name, statuses, dict(zip(KINDS, map(float, waits), strict=True)), float(seconds))

    def __str__(self) -> str:
        return " | ".join(self.cells())


@dataclass(slots=True)
class Record:
    """The rows so far by name, and the file to which each is written as it comes, if there is one.

    A file may have rows of earlier runs. A name that comes again replaces the row before.
    """

    path: Path | None
    rows: dict[str, Row] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | None) -> "Record":
        found = cls(path)
        if path is not None and path.exists():
            _, *lines = path.read_text(encoding="utf-8").splitlines()
            for row in (Row.read(line.split("\t")) for line in lines):
                found.rows[row.name] = row
        elif path is not None:
            path.write_text("\t".join(HEADS) + "\n", encoding="utf-8")
        return found

    def add(self, row: Row) -> None:
        self.rows[row.name] = row
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\t".join(row.cells()) + "\n")

    def has(self, name: str) -> bool:
        """Whether an attack of this name has been made, and nobody waited too long."""
        return name in self.rows and self.rows[name].passed

    def failed(self) -> list[Row]:
        return [row for row in self.rows.values() if not row.passed]

    def print(self) -> None:
        """The slowest rows, those that took too long first."""
        _print(self.rows.values())


def _print(rows: Iterable[Row]) -> None:
    slowest = sorted(rows, key=lambda row: -row.wait_seconds)
    table = Table(*HEADS, f"within {LIMIT_SECONDS:g} s", title=f"the worst of {len(slowest)}")
    for row in slowest[:SHOWN]:
        table.add_row(*row.cells(), "yes" if row.passed else "no")
    Console(width=160).print(table)
