"""What is measured on the device, in small: that it runs, and that what it compares is the same."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from engine.mlx_backend import host
from engine.mlx_backend.runner import Launch
from engine.values.settings import EngineConfig
from engine.values.stats import DecodeStats
from load_tests.bench.forward import Found, table
from measuring.device import (
    BLOCK_SIZE,
    DIM,
    HEADS,
    KV_HEADS,
    TooLarge,
    attend_by_row,
    attend_together,
    attending,
    attention_cases,
    checked_dtypes,
    filled_arena,
    gather_blocks,
    gather_heads,
    layout_cases,
    random,
)
from measuring.doctor import (
    LEAST_ROUNDS,
    SECTIONS,
    MeasureConfig,
    SectionPlan,
    Sizes,
    Task,
    rounds,
)
from measuring.engine_step import (
    STEPS,
    EngineHarness,
    NotApplicable,
    command_buffer_cases,
    median_times,
    memory_cases,
    step_cases,
    step_times,
)
from measuring.process import cases_of
from tests.checkpoints import SHALLOW, Family, write_family
from tests.devices import DEVICE, cpu_memory, is_cpu, launches

SIZES = Sizes(
    contexts=(64,),
    rows=(1, 2),
    rounds=1,
    step_contexts=(16, 1 << 14),
    prompt_tokens=64,
    pool_bytes=16 << 20,
    architectures=("llama", "phi3small", "mamba"),
)
UNITS = ("ms", "times")
CONFIG = MeasureConfig(EngineConfig("", max_running=2, step_tokens=32, decode="eager"), SIZES)


def test_attention_by_strategy() -> None:
    cases = attention_cases(SIZES)
    assert list(cases) == ["1 x 64", "2 x 64"]
    figures = cases["2 x 64"]()
    assert {"contiguous_ms", "gather_ms", "gather_times", "rounds"} <= figures.keys()


def test_what_does_not_fit_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = host.Machine("cpu", 1 << 20, 1 << 10, 1 << 10, 0.1)
    monkeypatch.setattr(host, "examine", lambda: nothing)
    with pytest.raises(TooLarge, match="are free"):
        attention_cases(SIZES)["1 x 64"]()


def test_both_layouts_say_the_same_of_the_same_keys() -> None:
    """An arena is laid out by the other layout; read so, it is what another holds in today's."""
    table = mx.array(np.array([[2, 0], [3, 1]], np.uint32))
    today, other = filled_arena(4, mx.float32), filled_arena(4, mx.float32)
    for ours, theirs in zip(today.layers, other.layers, strict=True):
        inside = [
            array.swapaxes(1, 2).reshape(-1, KV_HEADS, BLOCK_SIZE, DIM)
            for array in ours.blocks(mx.arange(4))
        ]
        theirs.put_blocks(0, *inside)
    queries = random(mx.float32, 2, HEADS, 1, DIM)
    expected = attending(today, queries, gather_heads(today, table))()
    assert isinstance(expected, mx.array)
    for attend in (attend_together, attend_by_row):
        found = attending(other, queries, gather_blocks(table), attend)()
        assert isinstance(found, mx.array)
        assert mx.allclose(found, expected, atol=1e-5)


def test_layouts_are_compared() -> None:
    figures = layout_cases(SIZES)["2 x 64"]()
    ours, theirs = {"today_ms"}, {f"other{how}_{unit}" for how in ("", "_by_row") for unit in UNITS}
    assert figures.keys() == ours | theirs | {"today_gather_ms", "other_gather_ms", "rounds"}


def test_a_step_over_the_bare_model_where_the_context_is_long_enough(tmp_path: Path) -> None:
    engine = replace(CONFIG.engine, model=str(write_family(SHALLOW, tmp_path)))
    cases = step_cases(replace(CONFIG, engine=engine))
    assert list(cases) == ["1 x 16", "2 x 16"]
    figures = cases["2 x 16"]()
    assert figures.keys() >= {"engine_ms", "bare_ms", "engine_times"}


def test_a_limit_on_command_buffers_is_measured_on_a_gpu(tmp_path: Path) -> None:
    engine = replace(CONFIG.engine, model=str(write_family(SHALLOW, tmp_path)))
    config = replace(CONFIG, engine=engine, sizes=replace(SIZES, step_contexts=(16,)))
    cases = command_buffer_cases(config, mx.Device(mx.gpu, 0))
    assert list(cases) == ["50 operations", "200 operations", "2,000 operations"]
    figures = cases["50 operations"]()
    assert figures.keys() == {"1_rows_ms", "2_rows_ms", "taken_mib", "cached_mib"}
    assert all(float(figures[name]) > 0 for name in ("1_rows_ms", "2_rows_ms", "taken_mib"))


def test_a_cpu_has_no_command_buffers_to_measure() -> None:
    with pytest.raises(NotApplicable, match="no command buffers on a CPU"):
        command_buffer_cases(CONFIG, mx.Device(mx.cpu, 0))


@pytest.mark.device
@cpu_memory
def test_memory_is_held_against_what_was_promised() -> None:
    cases = memory_cases(CONFIG)
    assert len(cases) == 2
    for measure in cases.values():
        figures = measure()
        assert 0 < float(figures["taken_times"]) < 1


LAUNCHED = {Launch.AHEAD: "launched ahead", Launch.WHEN_IDLE: "launched when idle"}


@pytest.mark.device
@pytest.mark.parametrize("launch", launches(), ids=lambda launch: launch.name)
def test_no_write_copies_a_pool_under_a_launch_that_serves(launch: Launch, tmp_path: Path) -> None:
    cases = cases_of(Task("donation", 0, CONFIG, tmp_path))
    compiled = [f"compiled, {name}" for name in LAUNCHED.values()]
    assert list(cases) == [*LAUNCHED.values(), *compiled]
    for name in (LAUNCHED[launch], f"compiled, {LAUNCHED[launch]}"):
        figures = cases[name]()
        assert float(figures["pool_mib"]) >= 16
        assert float(figures["pools_times"]) < 0.5


def test_load_checks_say_how_a_model_would_be_served(tmp_path: Path) -> None:
    cases = cases_of(Task("load check", 0, CONFIG, tmp_path))
    assert list(cases) == [
        f"{name}, {str(dtype).removeprefix('mlx.core.')}"
        for dtype in checked_dtypes(DEVICE)
        for name in ("llama", "phi3small", "mamba")
    ]
    llama, mamba = (cases[f"{name}, float32"]() for name in ("llama", "mamba"))
    assert (llama["batches"], llama["rejected_before"]) == ("joined rows", 0)
    assert mamba["batches"] == "rows of equal length"
    assert 0 < float(llama["deviation"]) < 1e-3
    with pytest.raises(Exception, match="not causal"):
        cases["phi3small, float32"]()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("plan", SECTIONS, ids=lambda plan: plan.name)
def test_every_section_of_the_plan_has_cases(plan: SectionPlan, tmp_path: Path) -> None:
    task = Task(plan.name, 0, CONFIG, tmp_path)
    if plan.name in ("command buffers", "attention choice") and is_cpu(DEVICE):
        with pytest.raises(NotApplicable):
            cases_of(task)
    else:
        assert cases_of(task)


def test_facts_name_no_model(tmp_path: Path) -> None:
    cases = cases_of(Task("machine", 0, CONFIG, tmp_path))
    found = {case: measure() for case, measure in cases.items()}
    assert found["model"]["architecture"] == "qwen3"
    assert found["machine"]["backend"] in ("cpu", "cuda", "metal")
    assert not [
        value for figures in found.values() for value in figures.values() if "/" in str(value)
    ]


def test_rounds_end_with_the_time_and_not_before_the_first_ones() -> None:
    assert list(rounds(9, 5.0, lambda: 0.0)) == list(range(9))
    times = iter([0.0, *[100.0] * 9])
    assert list(rounds(9, 5.0, lambda: next(times))) == list(range(LEAST_ROUNDS))


EAGER = EngineConfig("", decode="eager")


def test_an_engine_has_no_room_for_rows_beyond_the_models_context(tmp_path: Path) -> None:
    narrow = Family("narrow", {**SHALLOW.config, "max_position_embeddings": 128})
    for config in (
        replace(EAGER, model=str(write_family(narrow, tmp_path))),
        replace(EAGER, model=str(write_family(SHALLOW, tmp_path)), max_model_len=128),
    ):
        fitting, wide = (EngineHarness(config, rows=2, row_tokens=n) for n in (128, 1 << 14))
        assert wide.card.arena_tokens == fitting.card.arena_tokens


def test_prompts_whose_memory_is_measured_fit_into_the_context(tmp_path: Path) -> None:
    engine = replace(EAGER, model=str(write_family(SHALLOW, tmp_path)), max_model_len=128)
    config = replace(CONFIG, engine=engine, sizes=replace(SIZES, prompt_tokens=1 << 14))
    cases = memory_cases(config)
    assert list(cases) == ["1 x 64", f"{engine.max_running} x 64"]
    assert cases[f"{engine.max_running} x 64"]()


def test_each_turn_says_a_token_for_every_row() -> None:
    """Otherwise the engine raises. It starts again for the next number of rows."""
    engine = EngineHarness(EAGER, rows=3, row_tokens=256)
    engine.begin(3, prompt_tokens=20, max_tokens=100)
    engine.decode_seconds(steps=2)
    found = step_times(engine, rows=1, context_tokens=20, most_rounds=1, max_tokens=100)
    assert (found.compiled_share, found.decode) == (0.0, "eager")


def test_rows_begin_their_blocks_at_unlike_steps() -> None:
    engine = EngineHarness(EAGER, rows=1, row_tokens=256)
    lengths = engine.row_tokens(EAGER.block_size, 200)
    assert max(lengths) == 200
    assert len({length % EAGER.block_size for length in lengths}) == EAGER.block_size
    assert min(engine.row_tokens(8, 2)) == 1


def test_figures_are_medians_over_the_rounds() -> None:
    """Also the ratio, which is not that of the medians: the machine's pace changes both sides."""
    step = STEPS / 1e3  # a millisecond each
    taken = [(2 * step, 1 * step), (6 * step, 4 * step), (3 * step, 8 * step)]
    before, after = DecodeStats("eager: as set", 10, 4), DecodeStats("compiled: faster", 50, 34)
    found = median_times(taken, before, after)
    assert (found.engine_ms, found.bare_ms) == pytest.approx((3, 4))
    ratios = (found.least_times, found.engine_times, found.greatest_times)
    assert ratios == pytest.approx((0.375, 1.5, 2))
    assert table([Found(5, 256, found)]).rows == (
        ("5", "256", "3.00", "4.00", "1.500", "0.38", "2.00", "75%"),
    )
