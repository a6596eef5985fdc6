"""Which attention serves a model, and what users are told of it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module

from engine.mlx_backend.assembly import open_configured
from engine.mlx_backend.attentions import layer_kinds
from engine.mlx_backend.backend import describe_machine, load_backend
from engine.mlx_backend.kv.layout import (
    ChunkedCacheSpec,
    KVCacheSpec,
    Layout,
    StateSpec,
    UnusedSpec,
)
from engine.mlx_backend.kv.shape import LayerShape
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.tuning.choice import choose_attention, combined, compared
from engine.mlx_backend.tuning.kinds import LONGEST_KEYS, LayerKind, kinds_of
from engine.mlx_backend.tuning.record import RecordError, TrialRecord
from engine.mlx_backend.tuning.trial import Task, TrialProcess, Trials
from engine.values.attention import GATHER, AttentionTrial, TimedCell, TrialState
from engine.values.settings import EngineConfig, KVFormat
from tests.devices import cpu_attention
from tests.unit.tuning.test_record import KIND
from tests.unit.tuning.test_trials import fake_process

CHOICE = "engine.mlx_backend.tuning.choice"
WINDOWED = replace(KIND, window=512)
FAST = (
    TimedCell(1, 1024, {GATHER: 1.0, "paged": 0.9, "cascade": 2.0}),
    TimedCell(8, 1024, {GATHER: 3.0, "paged": 0.5, "cascade": 1.0}),
)
SLOW = tuple(replace(cell, milliseconds={GATHER: 0.1, "paged": 9.0}) for cell in FAST)


def passed(*cells: TimedCell, **rejected: str) -> AttentionTrial:
    return AttentionTrial("a kind", TrialState.PASSED, cells=cells, rejected=rejected)


def failed(why: str) -> AttentionTrial:
    return AttentionTrial("a kind", TrialState.FAILED, why)


@pytest.fixture
def trials(tmp_path: Path) -> Trials:
    return Trials(TrialRecord(tmp_path), "", fake_process)


def words(trials: Trials, known: Mapping[LayerKind, AttentionTrial]) -> str:
    """What the log says where this is known of full attention and of a window's."""
    kinds = {kind.window: Counter({kind: 2}) for kind in known}
    found = compared(kinds, Attention(), 32, trials, known.__getitem__)
    assert found.trials == tuple(known.values())
    assert found.attentions[-1].name == GATHER
    return found.words(found.attentions[0])


@pytest.mark.parametrize(
    ("trial", "expected"),
    [
        (passed(*FAST), "paged; not gather: it is slower; not cascade: it is slower"),
        (
            passed(*FAST, cascade="it is wrong"),
            "paged; not gather: it is slower; not cascade: it is wrong",
        ),
        (passed(FAST[1], SLOW[0]), "gather, paged; not cascade: it is slower"),
        (passed(*SLOW), "gather; not cascade: it is slower; not paged: it is slower"),
    ],
)
def test_the_fastest_serves_and_each_other_has_its_reason(
    trials: Trials, trial: AttentionTrial, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_candidates(monkeypatch)
    found = words(trials, {KIND: trial})
    assert sorted(found.split("; ")[1:]) == sorted(expected.split("; ")[1:])
    assert found.split("; ")[0] == expected.split("; ", maxsplit=1)[0]


def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """One way to share out the kernel's work."""
    monkeypatch.setattr("engine.mlx_backend.tuning.candidates.variants", lambda kind: [kind])


@pytest.mark.parametrize(
    ("trial", "why"),
    [
        (failed("its process ended: SIGSEGV"), "its process ended: SIGSEGV"),
        (
            AttentionTrial("a kind", TrialState.TRYING),
            "the machine or the daemon went down while attentions were compared; "
            "`rootstock doctor --measure --model NAME` compares again",
        ),
        (None, "it will be compared when the model is loaded"),
    ],
)
def test_without_times_gather_serves(
    trials: Trials, trial: AttentionTrial | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_candidates(monkeypatch)
    found = compared({None: Counter({KIND: 1})}, Attention(), 32, trials, lambda kind: trial)
    assert [each.name for each in found.attentions] == [GATHER]
    assert found.words(found.attentions[0]) == f"gather; not cascade, paged: {why}"


def test_a_kind_that_has_failed_leaves_the_others_alone(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_candidates(monkeypatch)
    found = words(trials, {KIND: passed(*FAST), WINDOWED: failed("it hangs")})
    assert found.startswith("gather, paged; ")
    assert f"not paged for {WINDOWED}: it hangs" in found


def test_a_file_that_cannot_be_read_is_the_one_reason(trials: Trials) -> None:
    def known(kind: LayerKind) -> AttentionTrial:
        raise RecordError("attention.json is damaged")

    found = compared({None: Counter({KIND: 1})}, Attention(), 32, trials, known)
    assert found.words(found.attentions[0]) == (
        "gather; not others: attention.json is damaged; "
        "`rootstock doctor --measure --model NAME` compares again"
    )


def test_layers_of_an_arena_are_weighed_by_their_number() -> None:
    """A size or an attention that one kind lacks is left out."""
    other = replace(KIND, value_dim=128)
    slow = (
        TimedCell(1, 1024, {GATHER: 1.0, "paged": 5.0}),
        TimedCell(8, 4096, {GATHER: 1.0, "paged": 5.0}),
    )
    known = {KIND: passed(*FAST), other: passed(*slow)}
    [cell] = combined(Counter({KIND: 3, other: 1}), known)
    assert (cell.rows, cell.keys) == (1, 1024)
    assert cell.milliseconds == pytest.approx({GATHER: 1.0, "paged": (3 * 0.9 + 5.0) / 4})
    assert combined(Counter({KIND: 3, other: 1}), {KIND: passed(*FAST)}) == []
    assert combined(Counter({KIND: 1}), {KIND: failed("why")}) == []


def test_what_has_failed_while_it_served_does_not_serve_after_the_next_start(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_candidates(monkeypatch)
    kinds: Mapping[int | None, Counter[LayerKind]] = {None: Counter({KIND: 1})}
    found = compared(kinds, Attention(), 32, trials, lambda kind: passed(*FAST))
    found.attentions[0].give_up(RuntimeError("the device is gone"))
    again = compared(kinds, Attention(), 32, trials, trials.known)
    assert [each.name for each in again.attentions] == [GATHER]
    assert "RuntimeError: the device is gone" in again.words(again.attentions[0])


def test_layers_are_told_apart_by_all_that_attention_depends_on() -> None:
    def layer(kv_heads: int = 2, dim: int = 64, dtype: mx.Dtype = mx.bfloat16) -> LayerShape:
        return LayerShape(kv_heads, dim, dim, dtype, dtype, KVFormat.Q8)

    latent = LayerShape(1, 512, 64, mx.bfloat16, mx.bfloat16)
    layout = Layout(
        (
            KVCacheSpec(layer()),
            KVCacheSpec(layer()),
            KVCacheSpec(layer(dim=24)),  # no group of a scale divides it: stored in full
            (KVCacheSpec(layer(), window=512), UnusedSpec()),
            ChunkedCacheSpec(layer(), window=512),
            KVCacheSpec(latent),
            StateSpec((), ()),
        ),
        mx.bfloat16,
        100,
    )
    model = Module()
    model.layer = Module()
    found = kinds_of(model, layout, query_heads=8, block_size=32, most_tokens=1 << 20)
    assert {*found} == {None, 512}
    first, second = found[None]
    assert found[None] == {first: 2, second: 1}
    assert (first.format, second.format) == (KVFormat.Q8, KVFormat.FULL)
    assert first.longest == LONGEST_KEYS
    [windowed] = found[512]
    assert (windowed.window, windowed.longest, windowed.has_sinks) == (512, 512, False)
    assert first.shape == layer()
    assert str(windowed) == (
        "8 heads over 2 KV heads of 64, bfloat16 as q8, window 512, blocks of 32"
    )
    model.layer.sinks = mx.zeros((8,))
    [windowed] = kinds_of(model, layout, 8, 32, 256)[512]
    assert (windowed.has_sinks, windowed.longest) == (True, 256)


@cpu_attention
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("auto", "cascade; not gather: it is slower on CPUs; not paged: its kernel is for GPUs"),
        (
            "gather",
            "gather; not cascade: the setting attention is gather; "
            "not paged: the setting attention is gather",
        ),
        (
            "paged",
            "paged; not gather: the setting attention is paged; "
            "not cascade: the setting attention is paged",
        ),
    ],
)
def test_a_cpu_and_a_setting_are_reasons(
    setting: Literal["auto", "gather", "paged"], expected: str
) -> None:
    config = EngineConfig("", attention=setting)
    report = describe_machine(config)
    assert report.card is not None
    assert report.card.attention_choice == expected
    assert report.card.attention == expected.partition(";")[0]
    assert report.attention == ()


@pytest.fixture
def comparing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This CPU compares as a GPU does. The folder of the record."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for module in (CHOICE, "engine.mlx_backend.assembly", "engine.mlx_backend.attentions"):
        monkeypatch.setattr(f"{module}.compares", lambda config: config.attention == "auto")
    few_candidates(monkeypatch)
    return tmp_path / "rootstock"


@cpu_attention
@pytest.mark.process
@pytest.mark.parametrize(
    ("child", "why"),
    [
        ("exits", "its process ended: exit status 3"),
        ("crashes", "its process ended: SIGSEGV"),
        ("hangs", "its process gave no result in 0.5 s"),
        ("babbles", "its process gave a result that cannot be read"),
    ],
)
def test_whatever_the_process_does_the_model_is_served_with_gather(
    comparing: Path, child: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.5 if child == "hangs" else 60.0
    monkeypatch.setattr(f"{CHOICE}.Trials", partial(Trials, start=fake_process, seconds=seconds))
    monkeypatch.setattr(f"{CHOICE}.kernel_digest", lambda: child)
    lines = list[str]()
    backend = load_backend(EngineConfig("", decode="eager"), lines.append)
    assert backend.card.attention == GATHER
    assert backend.card.attention_choice == f"gather; not cascade, paged: {why}"
    assert [line for line in lines if "attention:" in line] == [
        f"attention: {backend.card.attention_choice}"
    ]
    assert not backend.card.slowdowns


@cpu_attention
@pytest.mark.process
def test_what_was_compared_serves_is_shown_and_is_not_compared_again(
    comparing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gather` switches it off."""
    monkeypatch.setattr(f"{CHOICE}.Trials", partial(Trials, start=fake_process))
    config = EngineConfig("", decode="eager")
    before = describe_machine(config)
    assert before.card is not None
    assert "it will be compared when the model is loaded" in before.card.attention_choice
    assert not comparing.exists()
    lines = list[str]()
    load_backend(config, lines.append)
    backend = load_backend(config, lines.append)
    assert len([line for line in lines if "comparing attentions" in line]) == 1
    assert backend.card.attention == "cascade"
    after = describe_machine(config)
    assert after.card is not None
    assert after.card.attention_choice == backend.card.attention_choice
    assert after.attention == (passed(TimedCell(1, 1024, {GATHER: 2.0, "cascade": 1.0})),)
    off = describe_machine(replace(config, attention="gather"))
    assert off.card is not None
    assert (off.card.attention, off.attention) == (GATHER, ())


@cpu_attention
@pytest.mark.process
@pytest.mark.parametrize("damage", ["truncated", "version", "folder"])
def test_a_record_that_cannot_be_used_is_the_reason_for_gather(
    comparing: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[Task]()

    def start(task: Task) -> TrialProcess:
        started.append(task)
        raise OSError

    monkeypatch.setattr(f"{CHOICE}.Trials", partial(Trials, start=start))
    match damage:
        case "folder":
            comparing.touch()
        case _:
            comparing.mkdir()
            text = '{"ver' if damage == "truncated" else '{"version": 2, "entries": []}'
            (comparing / "attention.json").write_text(text)
    config = EngineConfig("")
    loaded = open_configured(config).loaded
    kinds = layer_kinds(config, loaded)
    found = choose_attention(config, kinds, (Attention(),), 1 << 30, lambda line: None)
    said = found.words(found.attentions[0])
    assert said.startswith(f"gather; not others: {comparing / 'attention.json'} ")
    assert said.endswith("`rootstock doctor --measure --model NAME` compares again")
    assert not started
