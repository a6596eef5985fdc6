"""Puts the backend's parts together for one configuration."""

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_unflatten

from engine.api import ModelError, Report
from engine.core.step import Backend
from engine.mlx_backend.attention.strategy import (
    Attention,
    GatherAttention,
    gathered_padding_keys,
)
from engine.mlx_backend.cpu.blas import Blas
from engine.mlx_backend.cpu.cascade import CascadeAttention
from engine.mlx_backend.decode.choice import DecodePath, compute_compiled
from engine.mlx_backend.decode.kernels import compiler_problem, marker, start_building
from engine.mlx_backend.errors import one_line
from engine.mlx_backend.host import machine
from engine.mlx_backend.host.allocator import allocator_limits, held_steps, limit_allocator
from engine.mlx_backend.host.memory_meter import MemoryMeter, MeteredRunner
from engine.mlx_backend.launch import launch_for
from engine.mlx_backend.loading.budget import Footprint
from engine.mlx_backend.loading.fit import Room, fit, storage_bytes
from engine.mlx_backend.loading.generation_config import sampling_defaults
from engine.mlx_backend.loading.loader import (
    FLOAT32_SHARE,
    LoadedModel,
    load_weights,
    named_weights,
    open_model,
)
from engine.mlx_backend.loading.pooled import Pooled, pooled_by
from engine.mlx_backend.loading.purpose import Purpose, find_purpose
from engine.mlx_backend.loading.selfcheck import install_patches
from engine.mlx_backend.loading.source import find_checkpoint
from engine.mlx_backend.loading.tokenizer import template_kind
from engine.mlx_backend.loading.working import step_bytes, working_bytes
from engine.mlx_backend.loading.workspace import Workspace, find_workspace
from engine.mlx_backend.model.batching import LADDER
from engine.mlx_backend.model.cached_model import CachedModel, Execution
from engine.mlx_backend.model.layout import Layout
from engine.mlx_backend.runner import MlxRunner
from engine.mlx_backend.sampling.sampler import Sampler
from engine.mlx_backend.storage.arena import block_bytes, token_bytes
from engine.mlx_backend.storage.state_arena import state_bytes
from engine.mlx_backend.storage.storage import Storage
from engine.text.tokenizer import CheckpointTokenizer
from engine.values.model import ModelCard, SamplingDefaults
from engine.values.settings import DEFAULT_NAME, EngineConfig
from engine.values.stats import MachineReport, MemoryPromise
from kvstore.sizes import StateCounts, StorageSizes, WindowSize


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose weights have not been read, and the machine as it was before."""

    checkpoint: Path
    loaded: LoadedModel
    host: machine.Machine
    used_bytes: int  # that MLX had given out


def assemble(config: EngineConfig, checkpoint: Path, blas: Blas, report: Report) -> Backend:
    """See `load_backend`."""
    machine.keep_resident()
    return assemble_opened(config, open_checkpoint(config, checkpoint), blas, report)


def open_configured(config: EngineConfig) -> OpenedModel:
    """The configured model, which must have been fetched. Raises ModelError."""
    return open_checkpoint(config, find_checkpoint(config.model, download=False))


def open_checkpoint(config: EngineConfig, checkpoint: Path) -> OpenedModel:
    """To be served within the memory that it is given. Raises ModelError."""
    used_bytes, host = mx.get_active_memory(), machine.examine_for(config.memory_bytes)
    purpose = _purpose(config, checkpoint)
    loaded = open_model(checkpoint, host.left_bytes, purpose, config.adapters)
    return OpenedModel(checkpoint, loaded, host, used_bytes)


def assemble_opened(
    config: EngineConfig, opened: OpenedModel, blas: Blas, report: Report
) -> Backend:
    """Read the weights, and allocate the arena. Raises ModelError."""
    loaded, host, used_bytes = opened.loaded, opened.host, opened.used_bytes
    sizes = _sizes(config, loaded, host)
    workspace, longest = _workspace(config, loaded), _longest(config, loaded, sizes)
    vocab_size, attending = loaded.layout.vocab_size, workspace.bytes(longest)
    buffers = step_bytes(config, vocab_size) + attending
    limit_allocator(allocator_limits(host, used_bytes, buffers))
    execution = load_weights(loaded, attentions(config.attention, loaded), report)
    pooled = pooled_by(loaded, execution.head, opened.checkpoint)
    storage = Storage(loaded.layout, sizes, config.block_size)
    for line in _inventory(config, loaded.layout, storage, sizes):
        report(line)
    # Where no layer keeps every token, windows are all that is gathered: few keys a row.
    most_keys = workspace.forward_keys(longest) if loaded.layout.full_layers else math.inf
    context_tokens = loaded.max_context_tokens
    model = CachedModel(loaded.model, loaded.layout, storage, execution, most_keys, context_tokens)
    sampling = _sampling(config, opened.checkpoint, report)
    stored = storage_bytes(footprint(loaded.layout, config.block_size), sizes)
    promise = MemoryPromise(
        loaded.weight_bytes,
        stored.arenas + stored.states,
        working_bytes(config, vocab_size) + attending,
        (held_steps(host) - 1) * buffers,
    )
    meter = MemoryMeter(promise, used_bytes, time.monotonic)
    launch = launch_for(mx.default_device())
    decode = _decode_path(config, opened, model)
    report(f"decode: {decode.why}")
    runner = MlxRunner(model, Sampler(loaded.layout.vocab_size), launch, pooled.pooler, decode)
    card = _card(config, opened.checkpoint, loaded, pooled, sizes, host, blas, sampling)
    report(f"tasks: {', '.join(card.tasks)}")
    return Backend(
        runner=MeteredRunner(runner, meter),
        card=card,
        tokenizer=CheckpointTokenizer(
            loaded.tokenizer._tokenizer, card.template, card.max_sequence_tokens
        ),
        hf_tokenizer=loaded.tokenizer._tokenizer,
        sizes=sizes,
        bytes=stored,
        kv_format=storage.kv_format,
        software=f"mlx={metadata.version('mlx')} mlx-lm={metadata.version('mlx-lm')}",
        part_bytes=storage.part_bytes,
        memory=meter.stats,
        decode=decode.stats,
        release_thread=partial(release_thread, decode),
    )


def _decode_path(config: EngineConfig, opened: OpenedModel, model: CachedModel) -> DecodePath:
    """Rehearses compiled decodes, or has a CPU's kernels built for that first."""
    path = DecodePath("as set")
    if config.decode == "eager":
        return path
    builder: subprocess.Popen[bytes] | None = None
    if mx.default_device() == mx.cpu and not marker(config, opened.checkpoint).exists():
        if problem := compiler_problem():
            return DecodePath(problem)
        rung, attention = model.execution.batching.name, model.execution.attention.name
        try:
            as_opened = replace(config, memory_bytes=opened.host.left_bytes)
            builder = start_building(as_opened, rung, attention)
        except OSError as error:
            return DecodePath(f"no process can be started to build its kernels: {error}")
        path = DecodePath("its kernels are being built")
        path.choose_after(builder, model)
    else:
        path.choose(model)
    return path


def release_thread(decode: DecodePath | None = None) -> None:
    """Give back what MLX keeps for this thread, as the thread's last act with it.

    What is left to the end of the thread may race with the end of the interpreter and abort it.
    """
    if decode is not None:
        decode.close()
    mx.clear_streams()


def free_bytes() -> int:
    return machine.examine().left_bytes


def needed_bytes(config: EngineConfig, default_bytes: int) -> int:
    """What the configured model takes: weights as they will be in memory, the work of a step, and
    the storage that the settings ask for, or else `default_bytes` for that. Reads no weights.

    Raises ModelError.
    """
    opened = open_configured(config)
    loaded = opened.loaded
    least = math.ceil(loaded.weight_bytes / FLOAT32_SHARE)  # or it would be read otherwise
    held = held_steps(opened.host)
    working = working_bytes(config, loaded.layout.vocab_size, held)
    if config.kv_cache_bytes is None:
        return max(loaded.weight_bytes + working + default_bytes, least)
    unbounded = replace(opened.host, left_bytes=sys.maxsize, most_bytes=sys.maxsize)
    sizes = _sizes(config, loaded, unbounded)
    stored = storage_bytes(footprint(loaded.layout, config.block_size), sizes)
    workspace = replace(_workspace(config, loaded), held_steps=held)
    attending = workspace.bytes(_longest(config, loaded, sizes))
    return max(loaded.weight_bytes + working + attending + stored.arenas + stored.states, least)


def build_kernels(config: EngineConfig, batching: str, attention: str, large_weights: int) -> None:
    """Compute compiled steps without reading weights of so many numbers; see `decode/kernels.py`.

    Raises ModelError, and whatever the model raises.
    """
    checkpoint = find_checkpoint(config.model, download=False)
    assert config.memory_bytes is not None
    purpose = _purpose(config, checkpoint)
    loaded = open_model(checkpoint, config.memory_bytes, purpose, config.adapters)
    small = {
        name: weights
        if weights.size < large_weights
        else mx.broadcast_to(mx.zeros((), weights.dtype), weights.shape)
        for name, weights in named_weights(loaded.model).items()
    }
    loaded.model.update(tree_unflatten(list(small.items())))
    execution = Execution(
        next(rung for rung in LADDER if rung.name == batching),
        next(one for one in attentions(config.attention, loaded) if one.name == attention),
        install_patches(loaded.model, loaded.layout),
        loaded.row_adapters,
    )
    least = StorageSizes(
        1,
        tuple(WindowSize(window, 1) for window in loaded.layout.windows),
        StateCounts(1, 0) if loaded.layout.states else None,
    )
    storage = Storage(loaded.layout, least, config.block_size)
    compute_compiled(CachedModel(loaded.model, loaded.layout, storage, execution))


def describe(config: EngineConfig, blas: Blas) -> MachineReport:
    """See `describe_machine`."""
    host = machine.examine_for(config.memory_bytes)
    weight_bytes, arena_tokens, arena_bytes, problem = 0, 0, 0, ""
    try:
        checkpoint = find_checkpoint(config.model, download=False)
        purpose = _purpose(config, checkpoint)
        loaded = open_model(checkpoint, host.left_bytes, purpose, config.adapters)
        sizes = _sizes(config, loaded, host)
        weight_bytes = loaded.weight_bytes
        arena_tokens = sizes.n_blocks * config.block_size
        arena_bytes = storage_bytes(footprint(loaded.layout, config.block_size), sizes).arenas
    except ModelError as error:
        problem = str(error)
    except Exception as error:  # as `load_backend` has it
        problem = one_line(error)
    return MachineReport(
        device=host.device,
        memory_bytes=host.memory_bytes,
        left_bytes=host.left_bytes,
        blas=str(blas),
        advice=blas.advice,
        mlx_version=metadata.version("mlx"),
        mlx_lm_version=metadata.version("mlx-lm"),
        model=config.model or DEFAULT_NAME,
        weight_bytes=weight_bytes,
        arena_tokens=arena_tokens,
        arena_bytes=arena_bytes,
        problem=problem,
    )


def _sizes(config: EngineConfig, loaded: LoadedModel, host: machine.Machine) -> StorageSizes:
    """`host` as it was before the weights were loaded. Raises ModelError when they do not fit."""
    held = held_steps(host)
    room = Room(
        left=host.left_bytes,
        most=host.most_bytes,
        weights=loaded.weight_bytes,
        working=working_bytes(config, loaded.layout.vocab_size, held),
        workspace=replace(_workspace(config, loaded), held_steps=held),
        share=host.kv_share,
    )
    kept = footprint(loaded.layout, config.block_size)
    return fit(config, kept, loaded.max_context_tokens, room)


def _workspace(config: EngineConfig, loaded: LoadedModel) -> Workspace:
    is_metal = mx.metal.is_available() and mx.default_device() != mx.cpu
    attention = attentions(config.attention, loaded)[0]
    return find_workspace(config, loaded.layout, loaded.query_heads, attention, is_metal=is_metal)


def _longest(config: EngineConfig, loaded: LoadedModel, sizes: StorageSizes) -> int:
    """Tokens of the longest sequence that there can be."""
    return min(loaded.max_context_tokens, sizes.n_blocks * config.block_size)


def footprint(layout: Layout, block_size: int) -> Footprint:
    """What the layers keep, in bytes."""
    return Footprint(
        block_bytes(layout.full_layers, block_size),
        tuple(
            (window, block_bytes(layout.layers_of(window), block_size)) for window in layout.windows
        ),
        state_bytes(layout.states),
    )


def _inventory(
    config: EngineConfig, layout: Layout, storage: Storage, sizes: StorageSizes
) -> Iterator[str]:
    """What has been allocated, in lines for the log."""
    size = config.block_size
    if layout.full_layers:
        bytes_used = f"{storage.full.bytes / 1e9:.2f} GB"
        yield f"KV cache: {sizes.n_blocks:,} blocks of {size} tokens, {bytes_used}"
    for window, arena in zip(sizes.windows, storage.windows, strict=True):
        yield (
            f"window of {window.window:,} tokens: {window.n_slots:,} blocks of {size} tokens, "
            f"{arena.bytes / 1e9:.2f} GB"
        )
    if sizes.states is not None:
        running, saved = sizes.states.running, sizes.states.saved
        one = state_bytes(layout.states)
        yield (
            f"recurrent states: {running} running and {saved} saved, at most "
            f"{(running + saved) * one / 1e9:.2f} GB"
        )


def attentions(name: str, loaded: LoadedModel) -> tuple[Attention, ...]:
    """What may serve under a setting, the preferred one first; the last is the reference.

    On GPUs `gather` until kernels of our own: mlx's attention is fused there.
    """
    key_bytes = token_bytes(loaded.layout.full_layers)
    gather = GatherAttention(gathered_padding_keys(loaded.weight_bytes, key_bytes))
    if name == "gather" or (name == "auto" and mx.default_device() != mx.cpu):
        return (gather,)
    return CascadeAttention(), gather


def _purpose(config: EngineConfig, checkpoint: Path) -> Purpose:
    return find_purpose(checkpoint, config.pooling, config.reranker)


def _sampling(config: EngineConfig, checkpoint: Path, report: Report) -> SamplingDefaults:
    if config.generation_config == "none":
        return SamplingDefaults()
    return sampling_defaults(checkpoint, report)


def _card(
    config: EngineConfig,
    checkpoint: Path,
    loaded: LoadedModel,
    pooled: Pooled,
    sizes: StorageSizes,
    host: machine.Machine,
    blas: Blas,
    sampling: SamplingDefaults,
) -> ModelCard:
    layout = loaded.layout
    return ModelCard(
        name=config.model or DEFAULT_NAME,
        fingerprint=loaded.fingerprint,
        vocab_size=layout.vocab_size,
        max_context_tokens=loaded.max_context_tokens,
        eos_token_ids=loaded.eos_token_ids,
        kv_bytes_per_token=token_bytes(layout.full_layers),
        arena_tokens=sizes.n_blocks * config.block_size,
        block_size=config.block_size,
        device=host.device,
        dtype=", ".join(str(dtype).removeprefix("mlx.core.") for dtype in layout.dtypes),
        blas=str(blas),
        sampling=sampling,
        checkpoint=str(checkpoint),
        template=template_kind(loaded.tokenizer, pooled.template),
        generates=loaded.purpose.generates,
        embedder=pooled.embedder,
        reranker=pooled.reranker,
        adapters=loaded.adapters,
    )
