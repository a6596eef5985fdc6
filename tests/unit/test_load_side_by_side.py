"""What is kept of a comparison, and how it is shown."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from load_tests.conditions import observe
from load_tests.report import Percentiles
from load_tests.scenarios.arrival import Arrived, Gap
from load_tests.scenarios.comeback import Back, CameBack, Crowd
from load_tests.scenarios.kinds import load_scenario, scenario_names
from load_tests.scenarios.load import Summary
from load_tests.scenarios.perform import Outcome
from load_tests.scenarios.restart import ENDINGS, Resent, Restarted
from load_tests.side_by_side.record import Record, read, write
from load_tests.side_by_side.rounds import Failure, Rounds
from load_tests.side_by_side.tables import Ratio, ratio, tables

ROOT = Path(__file__).parents[2]
NAMES_OF_ROWS = tuple(f"| {name} |" for name in scenario_names())
PEERS = ("rootstock", "mlx_lm.server", "vllm-mlx")


def summary(wall_seconds: float) -> Summary:
    durations = Percentiles(wall_seconds / 10, wall_seconds / 5, wall_seconds)
    return Summary(wall_seconds, 8, 100, 5, 40, 40 / wall_seconds, durations, durations, durations)


def arrived(seconds: float) -> Arrived:
    return Arrived(3600, seconds, 2 * seconds, seconds, (Gap(0.1, 0.05), Gap(1.0, seconds)))


def restarted(seconds: float) -> Restarted:
    found = zip(ENDINGS, (1000, 990, 980), strict=True)
    return Restarted(
        tuple(
            Resent("system prompt", ending, 1001, cached, 8 * seconds, seconds, is_same_text=True)
            for ending, cached in found
        )
    )


def came_back(seconds: float) -> CameBack:
    back = Back("SIGKILL", 4, 6000, 5984, 8 * seconds, seconds, 0.02, 0.03)
    crowd = Crowd("SIGKILL", (seconds, 9 * seconds), (0.5 * seconds, 2 * seconds), 0, 2**20)
    return CameBack(2**17, 2**30, (back,), (crowd,))


def record(name: str, outcome: Callable[[float], Outcome]) -> Record:
    """Ours takes 1 s; the others 2 and 3 times as long, and twice that in the second round."""
    rounds = tuple(
        {peer: outcome(slow * (place + 1)) for place, peer in enumerate(PEERS)} for slow in (1, 2)
    )
    found = Rounds(rounds, (Failure("vllm-mlx", "HTTP 500"),))
    return Record(name, load_scenario(name), observe(0, (), "a BLAS"), PEERS, found)


RECORDS = [
    record("unique-1", summary),
    record("unique-8", summary),
    record("long-prompt", arrived),
    record("restart", restarted),
    record("restart-wide", came_back),
]


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    for one in RECORDS:
        write(one, tmp_path)
    names = [one.name for one in RECORDS]
    assert read(tmp_path, [*names, "burst"]) == RECORDS


def test_a_ratio_above_one_says_that_we_are_faster() -> None:
    pairs = [
        (summary(1.0), summary(3.0)),
        (summary(2.0), summary(4.0)),
        (summary(1.0), summary(9.0)),
    ]
    found = ratio(pairs, lambda run: run.wall_seconds)
    assert found == Ratio(median=3.0, least=2.0, greatest=9.0)
    assert str(found) == "3.00 (2.00-9.00)"


def test_every_kind_of_scenario_has_its_table() -> None:
    loads, arrivals, restarts, backs, crowds = tables(RECORDS)
    for table in (loads, arrivals, restarts, backs, crowds):
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert [row[:3] for row in loads.rows] == [
        ("unique-1", "mlx_lm.server", "1.50 / 3.00"),
        ("unique-1", "vllm-mlx", "1.50 / 4.50"),
        ("unique-8", "mlx_lm.server", "1.50 / 3.00"),
        ("unique-8", "vllm-mlx", "1.50 / 4.50"),
    ]
    assert loads.rows[1][-2] == "3.00 (3.00-3.00)"
    assert arrivals.rows[0] == ("long-prompt", "rootstock", "1.50", "1.50", "3.00", "2.00")
    assert restarts.rows[2] == (
        *("restart", "system prompt", "SIGKILL", "1,001", "980", "98.0%"),
        *("12.00", "1.500", "8.0", "2 of 2"),
    )
    assert backs.rows[0] == (
        *("restart-wide", "4", "SIGKILL", "6,000", "99.7%"),
        *("12.00", "1.50", "1.40", "20", "30"),
    )
    assert crowds.rows[0] == (
        *("restart-wide", "2", "SIGKILL", "1.50 / 0.75", "13.50 / 3.00", "1"),
    )


def test_a_round_in_which_one_failed_counts_for_the_others_alone() -> None:
    first, second = RECORDS[0].results.rounds
    rounds = (first, {peer: second[peer] for peer in PEERS[:2]})
    (table,) = tables([dataclasses.replace(RECORDS[0], results=Rounds(rounds, ()))])
    assert [row[2] for row in table.rows] == ["1.50 / 3.00", "1.00 / 3.00"]


def test_a_server_that_always_failed_is_left_out() -> None:
    (found,) = [one for one in RECORDS if one.name == "long-prompt"]
    rounds = tuple({"rootstock": played["rootstock"]} for played in found.results.rounds)
    alone = dataclasses.replace(found, results=Rounds(rounds, ()))
    assert [row[1] for table in tables([alone]) for row in table.rows] == ["rootstock"]


def test_the_published_tables_are_those_of_the_kept_runs() -> None:
    kept = read(ROOT / "docs" / "benchmarks", scenario_names())
    shown = "\n".join(table.markdown() for table in tables(kept)).splitlines()
    page = (ROOT / "docs" / "performance.md").read_text("utf-8").splitlines()
    published = [line for line in page if line.startswith(NAMES_OF_ROWS)]
    assert len(published) > 20
    assert not [line for line in published if line not in shown]
