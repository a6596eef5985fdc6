"""The benchmark of one step, without its times."""

from engine.mlx_backend.loading.source import DEFAULT_CHECKPOINT
from load_tests.bench.bare import BareModel
from load_tests.bench.forward import TurnedEngine, measure, table


def test_each_turn_says_a_token_for_every_row() -> None:
    engine = TurnedEngine(DEFAULT_CHECKPOINT, max_running=4)
    for rows in (1, 3):
        engine.begin(rows, prompt_tokens=20)
        assert engine.seconds(steps=2) > 0  # which raises when a row says less, or more


def test_the_engine_is_held_against_the_bare_model() -> None:
    engine, bare = TurnedEngine(DEFAULT_CHECKPOINT, max_running=4), BareModel(DEFAULT_CHECKPOINT)
    found = measure(engine, bare, rows=2, rounds=2)
    assert found.least_ratio <= found.ratio <= found.greatest_ratio
    (row,) = table([found]).rows
    assert row[0] == "2"
