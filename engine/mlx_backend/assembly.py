"""Puts the backend's parts together for one configuration."""

from importlib import metadata
from pathlib import Path

import mlx.core as mx

from engine.mlx_backend import machine
from engine.mlx_backend.attention import dispatch
from engine.mlx_backend.attention.cascade import CascadeAttention
from engine.mlx_backend.attention.gather import GatherAttention
from engine.mlx_backend.attention.strategy import Attention
from engine.mlx_backend.backend import Backend
from engine.mlx_backend.blas import Blas
from engine.mlx_backend.budget import arena_blocks, default_kv_bytes
from engine.mlx_backend.default_model import default_checkpoint, user_cache_directory
from engine.mlx_backend.errors import ModelError
from engine.mlx_backend.loader import LoadedModel, Report, load_weights, open_model
from engine.mlx_backend.runner import MlxRunner
from engine.mlx_backend.sampler import Sampler
from engine.mlx_backend.source import find_checkpoint
from engine.mlx_backend.tokenizer import CheckpointTokenizer
from engine.types import EngineConfig, MachineReport, ModelCard
from kvstore.arena import Arena, block_bytes, token_bytes


def assemble(
    config: EngineConfig, blas: Blas, report: Report, cache_directory: Path | None
) -> Backend:
    """See `load_backend`."""
    checkpoint = _checkpoint(config, cache_directory, download=True)
    report(f"model {checkpoint}")
    loaded = open_model(checkpoint, machine.examine().left_bytes)
    load_weights(loaded, report)
    host = machine.examine()
    n_blocks = _n_blocks(config, loaded, host.left_bytes, host.kv_share)
    arena = Arena(loaded.layers, loaded.dtype, n_blocks, config.block_size)
    report(
        f"KV cache: {n_blocks:,} blocks of {config.block_size} tokens, {arena.bytes / 1e9:.2f} GB"
    )
    attention = _attention(config.attention)
    dispatch.install(loaded.model)
    return Backend(
        runner=MlxRunner(loaded.model, arena, attention, Sampler(loaded.vocab_size)),
        card=_card(config, loaded, arena, host, blas),
        tokenizer=CheckpointTokenizer(loaded.tokenizer),
        hf_tokenizer=loaded.tokenizer._tokenizer,
        n_blocks=n_blocks,
        arena_bytes=arena.bytes,
    )


def describe(config: EngineConfig, blas: Blas, cache_directory: Path | None) -> MachineReport:
    """See `describe_machine`."""
    host = machine.examine()
    model, arena_tokens, arena_bytes, problem = config.model or "(embedded default)", 0, 0, ""
    try:
        loaded = open_model(_checkpoint(config, cache_directory, download=False), host.left_bytes)
        left_bytes = host.left_bytes - loaded.weight_bytes
        n_blocks = _n_blocks(config, loaded, left_bytes, host.kv_share)
        arena_tokens = n_blocks * config.block_size
        arena_bytes = n_blocks * block_bytes(loaded.layers, config.block_size, loaded.dtype)
    except ModelError as error:
        problem = str(error)
    return MachineReport(
        device=host.device,
        memory_bytes=host.memory_bytes,
        left_bytes=host.left_bytes,
        blas=f"{blas.name} {blas.library}".strip(),
        advice=blas.advice,
        mlx_version=metadata.version("mlx"),
        mlx_lm_version=metadata.version("mlx-lm"),
        model=model,
        arena_tokens=arena_tokens,
        arena_bytes=arena_bytes,
        problem=problem,
    )


def _checkpoint(config: EngineConfig, cache_directory: Path | None, *, download: bool) -> Path:
    if config.model:
        return find_checkpoint(config.model, download=download)
    return default_checkpoint(cache_directory or user_cache_directory())


def _n_blocks(config: EngineConfig, loaded: LoadedModel, left_bytes: int, share: float) -> int:
    per_token = token_bytes(loaded.layers, loaded.dtype)
    kv_bytes = config.kv_cache_bytes
    if kv_bytes is None:
        useful = config.max_running * loaded.max_context_tokens * per_token
        kv_bytes = default_kv_bytes(left_bytes, share, useful)
    return arena_blocks(kv_bytes, per_token * config.block_size, config.max_running)


def _attention(name: str) -> Attention:
    """On GPUs `gather` until kernels of our own: mlx's attention is fused there."""
    if name == "gather" or (name == "auto" and mx.default_device() != mx.cpu):
        return GatherAttention()
    return CascadeAttention()


def _card(
    config: EngineConfig, loaded: LoadedModel, arena: Arena, host: machine.Machine, blas: Blas
) -> ModelCard:
    return ModelCard(
        name=config.model or "rootstock-default",
        fingerprint=loaded.fingerprint,
        vocab_size=loaded.vocab_size,
        max_context_tokens=loaded.max_context_tokens,
        eos_token_ids=loaded.eos_token_ids,
        kv_bytes_per_token=token_bytes(loaded.layers, loaded.dtype),
        arena_tokens=arena.n_blocks * arena.block_size,
        block_size=arena.block_size,
        device=host.device,
        dtype=str(loaded.dtype).removeprefix("mlx.core."),
        blas=f"{blas.name} {blas.library}".strip(),
    )
