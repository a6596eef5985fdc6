"""What attention and checks at load take was reserved for them, by MLX's own count of memory."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module

from engine.mlx_backend import assembly
from engine.mlx_backend.cpu.cascade import CascadeAttention
from engine.mlx_backend.decode.choice import DecodePath
from engine.mlx_backend.host import FusedAttention
from engine.mlx_backend.kv.layout import Layout, discover
from engine.mlx_backend.kv.storage import Storage
from engine.mlx_backend.loading.loader import load_weights
from engine.mlx_backend.loading.workspace import (
    GATHERED_BYTES,
    AttentionWorkspace,
    attention_workspace,
)
from engine.mlx_backend.model.attention import Attention, RowByRowAttention
from engine.mlx_backend.model.batching import LADDER, Batching
from engine.mlx_backend.model.cached_model import CachedModel, Execution
from engine.mlx_backend.model.patches import OutputHead, install_output_head
from engine.mlx_backend.model.rows import TokenSpan
from engine.mlx_backend.model.views import install_attention
from engine.values.settings import EngineConfig, KVFormat
from kvstore.sizes import StorageSizes
from measuring.random_checkpoint import CONFIGS, random_model
from tests.checkpoints import Family, write_family
from tests.devices import cpu_memory

HEADS = 8
BLOCK_SIZE = 32
ACTIVATIONS_BYTES = 4 << 20
"""Of all that is not attention in so narrow a model."""

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "intermediate_size": 64,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


@cache
def narrow() -> tuple[Module, Layout]:
    """A model whose attention takes more than all else."""
    model = random_model(CONFIG, 0, mx.float32)
    mx.eval(model.parameters())
    install_attention(model)
    return model, discover(model)


@cache
def head() -> OutputHead:
    model, layout = narrow()
    return install_output_head(model, layout.vocab_size)


def workspace(
    attention: Attention, rows: int, step_tokens: int, kv_format: KVFormat = KVFormat.FULL
) -> AttentionWorkspace:
    config = EngineConfig(model="", max_running=rows, step_tokens=step_tokens)
    layout = narrow()[1].stored_as(kv_format)
    return attention_workspace(config, layout, 0, HEADS, attention, FusedAttention.NONE)


def cached_model(
    attention: Attention,
    rows: int,
    keys: int,
    most_keys: float = math.inf,
    batching: Batching = LADDER[0],
    kv_format: KVFormat = KVFormat.FULL,
) -> CachedModel:
    model, in_full = narrow()
    layout = in_full.stored_as(kv_format)
    storage = Storage(layout, StorageSizes(rows * keys // BLOCK_SIZE), BLOCK_SIZE)
    return CachedModel(model, layout, storage, Execution(batching, attention, head()), most_keys)


def spans_of(rows: int, length: int, keys: int) -> list[TokenSpan]:
    """Rows of `keys` tokens each, `length` of them new."""
    blocks = keys // BLOCK_SIZE
    return [
        TokenSpan(
            keys - length, length, np.arange(row * blocks, (row + 1) * blocks, dtype=np.uint32)
        )
        for row in range(rows)
    ]


def last_logits(model: CachedModel, work: Sequence[TokenSpan]) -> mx.array:
    """After each span, `[rows, vocabulary]`, computed as the runner has it computed."""
    rows: dict[int, mx.array] = {}
    longest = max(span.n_tokens for span in work)
    token_ids = mx.arange(len(work) * longest, dtype=mx.int32) % narrow()[1].vocab_size
    spans = [
        replace(span, index=index, first_token=index * longest, n_read=1)
        for index, span in enumerate(work)
    ]
    for batch in model.arrange(spans).sampling:
        computed = model.forward(batch, token_ids)
        mx.async_eval(computed.logits, computed.fences)
        rows.update(zip((span.index for span in batch.spans), computed.logits, strict=True))
    return mx.stack([rows[index] for index in range(len(work))])


def peak_bytes(model: CachedModel, work: Sequence[TokenSpan]) -> int:
    """Of decodes or of one forward, above what was there before."""
    return peak_of(lambda: mx.eval(last_logits(model, work)))


def peak_of(compute: Callable[[], None]) -> int:
    """The most memory that `compute` takes, above what was there before."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    compute()
    return mx.get_peak_memory() - before


@pytest.mark.device
@cpu_memory
@pytest.mark.parametrize("attention", [Attention(), CascadeAttention()], ids=["g", "c"])
@pytest.mark.parametrize("kv_format", [KVFormat.FULL, KVFormat.BF16, KVFormat.Q8, KVFormat.K8V4])
@pytest.mark.parametrize(
    ("rows", "length", "keys"), [(16, 1, 1024), (1, 128, 4096), (4, 32, 2048), (3, 17, 1024)]
)
def test_a_forward_takes_no_more_than_is_reserved(
    attention: Attention, rows: int, length: int, keys: int, kv_format: KVFormat
) -> None:
    model = cached_model(attention, rows, keys, kv_format=kv_format)
    reserved = workspace(attention, rows, rows * length, kv_format).bytes(keys)
    assert peak_bytes(model, spans_of(rows, length, keys)) < reserved + ACTIVATIONS_BYTES


@pytest.mark.device
@cpu_memory
def test_what_is_reserved_for_gathering_is_not_far_more_than_it_takes() -> None:
    model = cached_model(Attention(), 16, 1024)
    space = workspace(Attention(), 16, 16)
    reserved = space.copies * space.forward_keys(1024) * space.key_bytes
    assert peak_bytes(model, spans_of(16, 1, 1024)) > 0.9 * reserved


@pytest.mark.device
@cpu_memory
def test_a_forward_is_split_where_its_keys_are_too_many_and_says_the_same() -> None:
    rows, keys = 16, 1024
    work = [
        replace(span, start=span.start - 100 * (row % 3))
        for row, span in enumerate(spans_of(rows, 1, keys))
    ]
    whole = cached_model(Attention(), rows, keys)
    parted = cached_model(Attention(), rows, keys, most_keys=rows // 4 * keys)
    peak = peak_bytes(whole, work)
    assert peak_bytes(parted, work) < peak / 3
    assert mx.allclose(last_logits(whole, work), last_logits(parted, work), atol=1e-5)


@pytest.mark.parametrize("lengths", [(40, 40, 40, 40), (1, 1, 1, 1), (40, 1, 7, 1)])
def test_rows_attended_one_by_one_say_what_they_say_together(lengths: tuple[int, ...]) -> None:
    """As on CUDA, without masks that are arrays: padded rows, decodes, and both."""
    rows, keys = len(lengths), 512
    work = [
        replace(span, start=span.stop - length - 100 * row, n_tokens=length)
        for row, (span, length) in enumerate(zip(spans_of(rows, 1, keys), lengths, strict=True))
    ]
    together = last_logits(cached_model(Attention(), rows, keys), work)
    one_by_one = last_logits(cached_model(RowByRowAttention(), rows, keys), work)
    assert mx.allclose(together, one_by_one, atol=1e-5)


def test_rows_of_one_token_are_attended_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA as elsewhere, by one kernel a layer and not by one for each row."""
    attend, n_calls = mx.fast.scaled_dot_product_attention, 0

    def counted(*args: Any, **kwargs: Any) -> mx.array:
        nonlocal n_calls
        n_calls += 1
        return attend(*args, **kwargs)

    rows, keys = 4, 512
    model, work = cached_model(RowByRowAttention(), rows, keys), spans_of(rows, 1, keys)
    last_logits(model, work)  # the first forward is traced, too
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", counted)
    last_logits(model, work)
    assert n_calls == CONFIG["num_hidden_layers"]


def test_one_long_row_may_gather_more_than_many_short_ones() -> None:
    space = AttentionWorkspace(
        rows=32,
        tokens=0,
        key_bytes=4096,
        gathered_bytes=GATHERED_BYTES,
        copies=2,
        pair_bytes=129,
    )
    affordable = GATHERED_BYTES // 4096
    assert space.forward_keys(1024) == 32 * 1024
    assert space.forward_keys(131_072) == affordable
    assert space.forward_keys(1 << 20) == 1 << 20


@pytest.mark.parametrize(
    ("weight_mib", "gathered_mib"), [(17, 128), (300, 300), (5000, 1024)], ids=str
)
def test_a_small_model_gathers_no_more_than_its_weights_or_the_least(
    weight_mib: int, gathered_mib: int
) -> None:
    config, (_, layout) = EngineConfig(model=""), narrow()
    space = attention_workspace(
        config, layout, weight_mib << 20, HEADS, Attention(), FusedAttention.NONE
    )
    assert space.gathered_bytes == gathered_mib << 20


def test_fused_attention_keeps_no_scores() -> None:
    config, (_, layout) = EngineConfig(model=""), narrow()
    fused, plain = (
        attention_workspace(config, layout, 0, HEADS, Attention(), kernels)
        for kernels in (FusedAttention.METAL, FusedAttention.NONE)
    )
    tokens = config.step_tokens + 16 * config.max_running
    assert plain.bytes(4096) - fused.bytes(4096) == tokens * 4096 * HEADS * 4


WIDE = {"num_key_value_heads": 4, "num_attention_heads": 4, "head_dim": 128}
"""Heads whose K and V take more than all else in a rehearsal."""


@pytest.mark.device
@cpu_memory
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("qwen3", WIDE),
        ("qwen3", {"vocab_size": 50_000}),
        ("gpt_oss", {}),  # windows
        ("falcon_h1", {}),  # recurrent states
    ],
)
def test_what_checks_at_load_take_is_in_the_plan(
    architecture: str, changes: dict[str, int], tmp_path: Path
) -> None:
    family = Family(architecture, {**CONFIGS[architecture], **changes})
    config = EngineConfig(str(write_family(family, tmp_path)), kv_cache_bytes=1 << 26)
    opened = assembly.open_configured(config)
    plan = opened.plan(config)
    mx.eval(opened.loaded.model.parameters())

    executions = list[Execution]()
    check = peak_of(
        lambda: executions.append(
            load_weights(opened.loaded, opened.choice.attentions, lambda line: None)
        )
    )
    assert plan.check_bytes / 8 < check < plan.check_bytes

    layout = opened.loaded.layout
    storage = Storage(layout, plan.sizes, config.block_size)
    model = CachedModel(opened.loaded.model, layout, storage, executions[0])
    path = DecodePath("not chosen yet")
    rehearsal = peak_of(lambda: path.choose(model, lambda line: None))
    assert "a compiled step takes" in path.why
    assert plan.rehearsal_bytes / 4 < rehearsal < plan.rehearsal_bytes
    assert plan.memory.workspace_bytes > plan.rehearsal_bytes
    assert replace(plan, config=replace(config, decode="eager")).rehearsal_bytes == 0
