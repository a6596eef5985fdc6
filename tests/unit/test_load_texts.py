"""The scenarios with real texts: their prompts, what is kept of their answers, and the tables."""

import textwrap
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import convert
from mlx_lm.utils import load_config
from typer import BadParameter

from load_tests.checkpoint import checkpoint, plain_copy
from load_tests.client import Answer, Generation
from load_tests.conditions import observe
from load_tests.report import Table
from load_tests.scenarios import option
from load_tests.scenarios.kinds import Text, load_scenario, scenario_names, text_scenario_names
from load_tests.scenarios.load import Run
from load_tests.scenarios.real_text import Answered, answered, build_text
from load_tests.scenarios.workloads import Workload
from load_tests.side_by_side.record import Record, read, write
from load_tests.side_by_side.rounds import Rounds
from load_tests.side_by_side.text_tables import short_table, text_table

ROOT = Path(__file__).parents[2]
TEXTS = Text(
    kind="text",
    description="two questions",
    concurrency=1,
    texts=("textwrap.dedent", "textwrap.indent"),
    openings=("What does {name} do?\n{text}", "And {name}?"),
    turns=("Why?",),
    system="Manual: {manual}",
    manual=("heapq.__about__",),
    waves=2,
    output_tokens=9,
)


def text_scenario(name: str) -> Text:
    scenario = load_scenario(name)
    assert isinstance(scenario, Text)
    return scenario


def test_each_opening_is_put_to_each_text_and_every_wave_is_alike() -> None:
    workload = build_text(TEXTS)
    first, second = workload.waves
    assert first == second
    openings = [conversation.turns[0] for conversation in first]
    assert openings[0].startswith("What does textwrap.dedent do?\nRemove any common")
    assert openings[2:] == ["And textwrap.dedent?", "And textwrap.indent?"]
    assert {conversation.turns[1:] for conversation in first} == {("Why?",)}
    assert all((one.system or "").startswith("Manual: Heap queues") for one in first)
    assert workload.generation == Generation(max_tokens=9, min_tokens=1)


def test_code_is_the_source_as_it_stands_in_the_library() -> None:
    changes = {"part": "source", "openings": ("{text}",)}
    first = build_text(TEXTS.model_copy(update=changes)).waves[0][0]
    text = first.turns[0]
    assert text.startswith("def dedent(text):")
    assert text in Path(textwrap.__file__).read_text("utf-8")


@pytest.mark.parametrize("name", text_scenario_names())
def test_the_scenarios_find_their_texts(name: str) -> None:
    scenario = text_scenario(name)
    for played in (scenario, scenario.quick()):
        conversations = build_text(played).waves[0]
        assert len({one.turns[0] for one in conversations}) == len(conversations)


def test_a_sampled_scenario_has_the_texts_of_the_greedy_one() -> None:
    seeded, greedy = text_scenario("text-crowd-seeded"), text_scenario("text-crowd")
    assert (seeded.temperature, seeded.seed, greedy.temperature) == (0.7, 7, 0)
    assert build_text(seeded).waves == build_text(greedy).waves


def test_a_text_without_a_docstring_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(textwrap.TextWrapper, "bare", lambda self: None, raising=False)
    scenario = TEXTS.model_copy(update={"texts": ("textwrap.TextWrapper.bare",)})
    with pytest.raises(ValueError, match=r"textwrap\.TextWrapper\.bare has no docstring"):
        build_text(scenario)


def run_of(workload: Workload, seconds: float, text: str) -> Run:
    """The answers of both waves, which take 1 and 2 times as long, in the order of their ends."""
    answers = [
        Answer(
            wave=wave,
            conversation=conversation,
            turn=turn,
            started_seconds=10.0 * wave,
            first_token_seconds=0.5,
            latency_seconds=seconds * (wave + 1),
            gap_seconds=(0.1, seconds / 4),
            prompt_tokens=100,
            cached_tokens=60,
            completion_tokens=5,
            drafted_tokens=4,
            accepted_tokens=3,
            text=f"{text} {conversation} {turn}",
        )
        for wave in range(2)
        for conversation in range(4)
        for turn in range(2)
    ]
    return Run(100.0, tuple(reversed(answers)))


def played(seconds: float, text: str) -> Answered:
    workload = build_text(TEXTS)
    return answered(workload, run_of(workload, seconds, text))


def record(name: str = "text-questions", **changes: Any) -> Record:
    """Two rounds; vllm-mlx fails in the second and says something else in the first."""
    first = {
        "rootstock": played(2.0, "yes"),
        "mlx_lm.server": played(6.0, "yes"),
        "vllm-mlx": played(8.0, "no"),
    }
    second = {"rootstock": played(2.0, "yes"), "mlx_lm.server": played(4.0, "yes")}
    scenario = TEXTS.model_copy(update=changes)
    peers = ("rootstock", "mlx_lm.server", "vllm-mlx")
    return Record(name, scenario, observe(0, (), "a BLAS"), peers, Rounds((first, second), ()))


def test_waves_are_added_up_apart_and_texts_are_in_the_order_of_the_prompts() -> None:
    found = played(2.0, "yes")
    assert [wave.summary.wall_seconds for wave in found.waves] == [2.0, 4.0]
    first, second = found.waves
    assert first.answers == second.answers
    assert len(set(first.answers)) == 8
    assert (first.summary.completion_tokens, first.accepted_tokens, first.drafted_tokens) == (
        *(40, 24),
        32,
    )
    assert found.prompts == played(3.0, "no").prompts


def test_what_is_kept_of_texts_comes_back(tmp_path: Path) -> None:
    kept = record()
    write(kept, tmp_path)
    assert read(tmp_path, ["text-questions"]) == [kept]


def test_a_row_for_each_wave_and_server_compares_speed_and_texts() -> None:
    table = text_table([record()])
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [(row["work"], row["server"]) for row in rows] == [
        (work, server)
        for work in ("text-questions", "text-questions, again")
        for server in ("rootstock", "mlx_lm.server", "vllm-mlx")
    ]
    ours, theirs, third = rows[:3]
    assert (ours["wall s"], ours["tokens/s"], ours["cached"]) == ("2.0", "20.0", "60%")
    assert (ours["worst gap s"], ours["drafts accepted"]) == ("0.50", "48 of 64")
    assert (ours["same texts"], third["same texts"], theirs["same texts"]) == (
        *("16 of 16", "0 of 8"),
        "",
    )
    faster = "Rootstock is faster, times"
    assert [row[faster] for row in rows[:3]] == ["", "2.50 (2.00-3.00)", "4.00 (4.00-4.00)"]


def test_sampled_texts_are_not_compared() -> None:
    table = text_table([record(temperature=0.7)])
    assert {row[table.columns.index("same texts")] for row in table.rows} == {""}


def test_the_short_table_says_what_the_work_was() -> None:
    assert short_table([record()]).rows == (
        ("two questions", "2.0", "5.0", "2.50"),
        ("two questions, again", "4.0", "10.0", "2.50"),
    )


def rows_of(table: Table, page: str) -> tuple[set[str], list[str]]:
    """The table's lines, and those of the page that begin as one of them does."""
    lines = set(table.markdown().splitlines()[2:])
    firsts = tuple({line[: line.index(" |", 2) + 2] for line in lines})
    text = (ROOT / page).read_text("utf-8").splitlines()
    return lines, [line for line in text if line.startswith(firsts)]


def test_the_published_figures_of_real_texts_are_those_of_the_kept_runs() -> None:
    kept = read(ROOT / "docs" / "benchmarks", text_scenario_names())
    short, shown = rows_of(short_table(kept), "README.md")
    assert len(shown) >= 6
    assert not [line for line in shown if line not in short]
    full, published = rows_of(text_table(kept), "docs/performance.md")
    assert set(published) == full


def test_servers_do_equal_work_because_the_copy_is_not_quantized(tmp_path: Path) -> None:
    original = tmp_path / "original"
    random_weights = checkpoint("agent", cache=tmp_path)
    convert(str(random_weights), str(original), quantize=True, q_group_size=32, q_bits=8)
    assert "quantization" in load_config(original)
    copy = plain_copy(original, tmp_path / "copies")
    assert "quantization" not in load_config(copy)
    weights = mx.load(str(copy / "model.safetensors"))
    assert isinstance(weights, dict)
    assert {array.dtype for array in weights.values()} <= {mx.float32, mx.bfloat16}
    assert plain_copy(original, tmp_path / "copies") == copy


def test_a_pattern_names_all_scenarios_that_match() -> None:
    assert option._known(["text-crowd*", "burst"]) == [
        name for name in scenario_names() if name.startswith("text-crowd") or name == "burst"
    ]
    with pytest.raises(BadParameter, match="nothing"):
        option._known(["nothing-*"])
