"""What is kept of a comparison, and how it is shown."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from load_tests.bench.floor import Floor, Work
from load_tests.conditions import observe
from load_tests.report import Percentiles
from load_tests.scenarios.arrival import Arrived, Gap
from load_tests.scenarios.comeback import Back, CameBack, Crowd
from load_tests.scenarios.kinds import Load, load_scenario
from load_tests.scenarios.load import Summary
from load_tests.scenarios.loading import Loaded, Phase
from load_tests.scenarios.perform import Outcome
from load_tests.scenarios.restart import ENDINGS, Resent, Restarted
from load_tests.scenarios.shares import Probe, Probed
from load_tests.side_by_side.plots import draw
from load_tests.side_by_side.record import Record, read, write
from load_tests.side_by_side.rounds import FLOOR, Bench, Failure, Rounds
from load_tests.side_by_side.tables import Ratio, ratio, tables
from tests.checkpoints import SHALLOW, write_family

PEERS = ("rootstock", "mlx_lm.server", "vllm-mlx")
BARE = Floor(Work(1000, 480, 4, 561), 2000.0, 0.01, 5.0)


def summary(wall_seconds: float) -> Summary:
    durations = Percentiles(wall_seconds / 10, wall_seconds / 5, wall_seconds)
    return Summary(wall_seconds, 8, 100, 5, 40, 40 / wall_seconds, durations, durations, durations)


def arrived(seconds: float) -> Arrived:
    return Arrived(3600, seconds, 2 * seconds, seconds, (Gap(0.1, 0.05), Gap(1.0, seconds)))


def probed(seconds: float) -> Probed:
    return Probed(tuple(Probe(share, 2000, 0, seconds) for share in (0.0, 0.5)))


def loaded(seconds: float) -> Loaded:
    calm, beside = (
        Phase(10 * gap, 2**20, gap, 2 * gap, (Gap(0.1, gap),)) for gap in (seconds, 1.5 * seconds)
    )
    return Loaded(4000, 3999, 8 * seconds, seconds, calm, calm, beside, beside, beside)


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


def with_floor(found: Record) -> Record:
    rounds = tuple({**played, FLOOR: BARE} for played in found.results.rounds)
    return dataclasses.replace(found, results=Rounds(rounds, ()))


RECORDS = [
    record("unique-1", summary),
    record("unique-8", summary),
    record("long-prompt", arrived),
    record("cached-share", probed),
    record("loading", loaded),
    record("restart", restarted),
    record("restart-wide", came_back),
]


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    kept = [with_floor(RECORDS[0]), *RECORDS[1:]]
    for one in kept:
        write(one, tmp_path)
    names = [one.name for one in kept]
    assert read(tmp_path, [*names, "burst"]) == kept


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
    loads, arrivals, shares, loadings, restarts, backs, crowds = tables(RECORDS)
    for table in (loads, arrivals, shares, loadings, restarts, backs, crowds):
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert [row[:3] for row in loads.rows] == [
        ("unique-1", "mlx_lm.server", "1.50 / 3.00"),
        ("unique-1", "vllm-mlx", "1.50 / 4.50"),
        ("unique-8", "mlx_lm.server", "1.50 / 3.00"),
        ("unique-8", "vllm-mlx", "1.50 / 4.50"),
    ]
    assert loads.rows[1][-2] == "3.00 (3.00-3.00)"
    assert arrivals.rows[0] == ("long-prompt", "rootstock", "1.50", "1.50", "3.00", "2.00")
    assert shares.rows[1] == ("cached-share", "mlx_lm.server", "3.000", "3.000")
    assert loadings.rows[2] == ("loading", "loading", "1.0", "22.50", "2250", "4500")
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


def test_a_load_is_held_against_its_floor() -> None:
    _, table = tables([with_floor(RECORDS[0])])
    (row,) = table.rows
    assert row[:4] == ("unique-1", "1.50", "5.00", "0.30 (0.20-0.40)")


def test_plots_are_small_and_the_same_each_time(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        drawn = draw(RECORDS, folder)
        assert [file.name for file in drawn] == ["throughput.svg", "gaps.svg", "first-token.svg"]
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()
        assert file.stat().st_size < 64 * 1024
        assert all(peer in file.read_text() for peer in PEERS)


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    assert draw(RECORDS[:1], tmp_path) == []


@pytest.mark.parametrize("name", ["long-prompt", "cached-share"])
def test_a_server_that_always_failed_is_left_out(name: str, tmp_path: Path) -> None:
    (found,) = [one for one in RECORDS if one.name == name]
    rounds = tuple({"rootstock": played["rootstock"]} for played in found.results.rounds)
    alone = dataclasses.replace(found, results=Rounds(rounds, ()))
    assert [row[1] for table in tables([alone]) for row in table.rows] == ["rootstock"]
    (file,) = draw([alone], tmp_path)
    assert "vllm-mlx" not in file.read_text()


@pytest.mark.slow
def test_a_floor_is_its_work_at_the_bare_models_speed(tmp_path: Path) -> None:
    load = Load(
        description="", concurrency=2, conversations=2, turns=2, user_words=6, output_tokens=3
    )
    found = Bench(write_family(SHALLOW, tmp_path), tmp_path).measure_floor(load, seed=0)
    assert isinstance(found, Floor)
    assert (found.work.steps, found.work.rows) == (2 * 2 * 3 // 2, 2)
    assert found.work.new_prompt_tokens > 2 * 2 * 6
    prefill_seconds = found.work.new_prompt_tokens / found.prefill_tokens_per_second
    assert found.seconds == pytest.approx(prefill_seconds + 6 * found.step_seconds)


@pytest.mark.slow
def test_a_floor_that_cannot_be_measured_is_reported(tmp_path: Path) -> None:
    load = Load(description="", concurrency=1, conversations=1, user_words=6, output_tokens=3)
    found = Bench(tmp_path / "no-model", tmp_path).measure_floor(load, seed=0)
    assert isinstance(found, Failure)
    assert "no-model" in found.reason
