"""What is kept of a scenario: one file of JSON each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from load_tests.conditions import Conditions
from load_tests.scenarios.kinds import Scenario
from load_tests.side_by_side.rounds import Rounds


@dataclass(frozen=True, slots=True)
class Record:
    """One scenario with all its runs. `peers` are names, ours first."""

    name: str
    scenario: Scenario
    conditions: Conditions
    peers: tuple[str, ...]
    results: Rounds


_RECORD = TypeAdapter(Record)


def write(record: Record, folder: Path) -> None:
    """Keep it as NAME.json, in place of what was kept under the name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{record.name}.json").write_bytes(_RECORD.dump_json(record, indent=1) + b"\n")


def read(folder: Path, names: Sequence[str]) -> list[Record]:
    """Those of the names that have a record, in the names' order."""
    files = (folder / f"{name}.json" for name in names)
    return [_RECORD.validate_json(file.read_bytes()) for file in files if file.exists()]
