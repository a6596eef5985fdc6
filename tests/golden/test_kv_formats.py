"""The check of formats at load: each is measured, told, and refused where it changes too much."""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from engine.api import ModelError
from engine.mlx_backend.assembly import describe, open_configured
from engine.mlx_backend.blas import Blas
from engine.mlx_backend.kv.formats import Codec
from engine.mlx_backend.kv.states import StateArena
from engine.mlx_backend.kv.storage import Storage
from engine.mlx_backend.loading.format_check import (
    MOST_DIVERGENCE,
    Divergences,
    check_formats,
    format_check_bytes,
)
from engine.mlx_backend.loading.loader import load_weights, open_model
from engine.mlx_backend.model.attention import Attention
from engine.values.settings import EngineConfig, KVFormat, StateFormat
from kvstore.types import SlotId
from tests.checkpoints import FAMILIES, write_family

ENOUGH_BYTES = 1 << 30
"""To compute in float32."""

PEAK_BYTES = 4 << 20
"""More than MLX keeps for itself."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_family(FAMILIES["llama"], tmp_path)


def load(
    checkpoint: Path,
    kv_format: KVFormat = KVFormat.AUTO,
    state_format: StateFormat = StateFormat.AUTO,
    memory_bytes: int = ENOUGH_BYTES,
) -> tuple[Divergences, list[str]]:
    """The divergences that the check finds, and what is reported."""
    lines = list[str]()
    loaded = open_model(checkpoint, memory_bytes, kv_format=kv_format, state_format=state_format)
    execution = load_weights(loaded, (Attention(),), lambda line: None)
    config = EngineConfig(str(checkpoint), kv_format=kv_format, state_format=state_format)
    return check_formats(loaded, execution, config, lines.append), lines


def test_smaller_formats_change_more_and_all_are_reported(checkpoint: Path) -> None:
    divergences = dict[KVFormat, float]()
    for format in KVFormat:
        (divergence, _), lines = load(checkpoint, format)
        if divergence is None:
            assert lines == []
        else:
            (line,) = lines
            assert line.startswith(f"KV cache in {format}: KL divergence")
            divergences[format] = divergence
    assert 0 < divergences[KVFormat.F16] < divergences[KVFormat.BF16]
    assert 0 < divergences[KVFormat.Q8] < divergences[KVFormat.K8V4]
    assert len(divergences) == 4


@pytest.mark.parametrize(
    ("family", "kv_format", "memory_bytes"),
    [
        ("mamba2", KVFormat.Q8, ENOUGH_BYTES),
        ("deepseek_v3", KVFormat.K8V4, ENOUGH_BYTES),
        ("llama", KVFormat.F16, 1),
    ],
)
def test_a_format_that_a_model_cannot_have_changes_nothing_and_that_is_reported(
    family: str, kv_format: KVFormat, memory_bytes: int, tmp_path: Path
) -> None:
    """Without K and V, with latents, and in half precision, as where memory is short."""
    checkpoint = write_family(FAMILIES[family], tmp_path, dtype=mx.bfloat16)
    divergences, lines = load(checkpoint, kv_format, memory_bytes=memory_bytes)
    assert divergences == (None, None)
    assert lines == [
        f"kv_format {kv_format} makes none of this model's K and V smaller: all stays full"
    ]


def test_states_in_half_precision_are_measured_apart_from_k_and_v(tmp_path: Path) -> None:
    checkpoint = write_family(FAMILIES["qwen3_next_q8"], tmp_path)
    found = dict[StateFormat, float]()
    for format in (StateFormat.F16, StateFormat.BF16):
        (kv, state), lines = load(checkpoint, KVFormat.Q8, format)
        assert kv is not None
        assert state is not None
        assert lines[0].startswith("KV cache in q8: KL divergence")
        assert lines[1].startswith(f"recurrent states saved in {format}: KL divergence")
        found[format] = state
    assert 0 < found[StateFormat.F16] < found[StateFormat.BF16]


def test_a_model_without_states_says_that_their_format_changes_nothing(checkpoint: Path) -> None:
    divergences, lines = load(checkpoint, state_format=StateFormat.F16)
    assert divergences == (None, None)
    assert lines == ["state_format f16 makes none of this model's states smaller: all stays full"]


def test_states_that_cannot_be_rounded_are_refused_with_the_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_family(FAMILIES["mamba2"], tmp_path)
    read_saved = StateArena.read_saved

    def wrong(arena: StateArena, slots: Sequence[SlotId]) -> list[mx.array]:
        return [-array for array in read_saved(arena, slots)]

    monkeypatch.setattr(StateArena, "read_saved", wrong)
    with pytest.raises(ModelError, match=r"state_format bf16 .*divergence of [\d.]+, and at most"):
        load(checkpoint, state_format=StateFormat.BF16)


def outlying(checkpoint: Path, times: float) -> None:
    """Let one channel of the keys be so much larger, and that of the queries as much smaller. What
    the model computes stays as it was.
    """
    file = checkpoint / "model.safetensors"
    weights = mx.load(str(file))
    assert isinstance(weights, dict)
    head_dim = FAMILIES["llama"].config["head_dim"]
    # RoPE turns the first channel together with that half a head further.
    is_scaled = mx.arange(head_dim) % (head_dim // 2) == 0
    factors = mx.where(is_scaled, times, 1.0)
    for name, array in weights.items():
        for projection, by in (("k_proj", factors), ("q_proj", 1 / factors)):
            if projection in name:
                heads = array.reshape(-1, head_dim, array.shape[-1])
                weights[name] = (heads * by[:, None]).reshape(array.shape)
    mx.save_safetensors(str(file), weights, {"format": "mlx"})


def test_keys_that_cannot_be_quantized_are_refused_with_the_figure(checkpoint: Path) -> None:
    (before, _), _ = load(checkpoint, KVFormat.Q8)
    outlying(checkpoint, 20)
    (moderate, _), _ = load(checkpoint, KVFormat.Q8)
    assert before is not None
    assert moderate is not None
    assert before < moderate < MOST_DIVERGENCE[KVFormat.Q8]
    outlying(checkpoint, 1000)
    with pytest.raises(ModelError, match=r"kv_format q8 .*KL divergence of [\d.]+, and at most"):
        load(checkpoint, KVFormat.Q8)
    load(checkpoint, KVFormat.FULL)


def test_a_model_that_does_not_run_with_a_format_is_refused_in_words(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(codec: Codec, rows: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(Codec, "decode", fail)
    with pytest.raises(ModelError, match="does not run with kv_format q8: no such thing; set it"):
        load(checkpoint, KVFormat.Q8)


def test_the_check_takes_no_more_memory_than_is_planned(checkpoint: Path) -> None:
    loaded = open_model(checkpoint, ENOUGH_BYTES, kv_format=KVFormat.Q8)
    execution = load_weights(loaded, (Attention(),), lambda line: None)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    config = EngineConfig(str(checkpoint), kv_format=KVFormat.Q8)
    check_formats(loaded, execution, config, lambda line: None)
    assert mx.get_peak_memory() - before < format_check_bytes(loaded.layout) + PEAK_BYTES


@pytest.mark.parametrize(
    ("family", "kv_format"),
    [
        ("qwen3_q8", KVFormat.Q8),
        ("gpt_oss_k8v4", KVFormat.K8V4),  # windows
        ("gemma4_text", KVFormat.Q8),  # heads that groups divide in some layers
        ("deepseek_v3", KVFormat.BF16),  # latents
    ],
)
def test_the_bytes_that_are_told_are_those_that_are_allocated(
    family: str, kv_format: KVFormat, tmp_path: Path
) -> None:
    config = EngineConfig(
        str(write_family(FAMILIES[family], tmp_path)), kv_cache_bytes=4 << 20, kv_format=kv_format
    )
    opened = open_configured(config)
    plan = opened.plan(config)
    storage = Storage(opened.loaded.layout, plan.sizes, config.block_size)
    card, arenas = describe(config, Blas()).card, (storage.full, *storage.windows)
    assert card is not None
    held = [sum(plane.nbytes for plane in arena.planes()) for arena in arenas]
    # Two blocks of each arena belong to no sequence.
    of_blocks = [n // (arena.n_blocks + 2) for n, arena in zip(held, arenas, strict=True)]
    assert of_blocks == list(storage.part_bytes[:-1])
    used = sum(n * arena.n_blocks for n, arena in zip(of_blocks, arenas, strict=True))
    assert used == plan.stored.arenas == plan.memory.kv_bytes
    assert card.kv_bytes_per_token * config.block_size == of_blocks[0]
    assert card.arena_tokens == storage.full.n_blocks * config.block_size
