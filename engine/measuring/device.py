"""The device, and what MLX does on it with tiny random checkpoints: donation, the check at load."""

import gc
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

import mlx.core as mx

from engine.core.step import BatchEntry, Decode, Prefill, Sampling, SequenceId, StepPlan
from engine.measuring.attention import require_bytes
from engine.measuring.messages import Cases, Figures, Sizes
from engine.measuring.random_checkpoint import CONFIGS, VOCAB_SIZE, tiny_tokenizer, write_checkpoint
from engine.mlx_backend import host
from engine.mlx_backend.assembly import attentions
from engine.mlx_backend.cpu.blas import load_blas
from engine.mlx_backend.decode.choice import DecodePath
from engine.mlx_backend.decode.compiled import CompiledDecode
from engine.mlx_backend.kv.arena import token_bytes
from engine.mlx_backend.kv.storage import Storage
from engine.mlx_backend.loading.loader import LoadedModel, load_weights, open_model
from engine.mlx_backend.model.cached_model import CachedModel, Execution
from engine.mlx_backend.runner import Launch, MlxRunner
from engine.mlx_backend.sampling.sampler import Sampler
from engine.values.request import SamplingParams
from kvstore.ops import TablePatch
from kvstore.sizes import StorageSizes

BLOCK_SIZE = 8
ROWS, PROMPT_TOKENS, CHUNK_TOKENS, STEPS = 4, 40, 30, 20
ROW_BLOCKS = 100
"""Blocks of each row: enough for all chunks of the first row."""

_NAMES = tuple(map(SequenceId, range(ROWS)))
_DONATION_ARCHITECTURE = "qwen3"
_SEED = 0
_PACKAGES = ("mlx", "mlx-lm", "rootstock-serve")
_CHIP_FACTS = ("architecture", "compute_capability_major", "driver_version")
"""Keys of `mx.device_info` that only some devices have."""


def machine_facts() -> Figures:
    """The device, its memory, and the software, without the machine's name."""
    machine, info = host.examine(), mx.device_info()
    chip = {name: info[name] for name in _CHIP_FACTS if name in info}
    backends = {"metal": mx.metal.is_available(), "cuda": mx.cuda.is_available()}
    return {
        "device": machine.device,
        **chip,
        "backend": next((name for name, is_there in backends.items() if is_there), "cpu"),
        "memory_gib": machine.memory_bytes / 2**30,
        "free_gib": machine.left_bytes / 2**30,
        "cores": os.cpu_count() or 0,
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "blas": load_blas().brief,
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def load_check_cases(sizes: Sizes, scratch: Path) -> Cases:
    """The daemon's check at load of every architecture, in each of `checked_dtypes`."""
    return {
        f"{name}, {str(dtype).removeprefix('mlx.core.')}": partial(
            _load_check, name, dtype, scratch
        )
        for dtype in checked_dtypes(mx.default_device())
        for name in sizes.architectures or CONFIGS
    }


def checked_dtypes(device: mx.Device) -> tuple[mx.Dtype, ...]:
    """Float32, which shows an error best, and on GPUs bfloat16, which most models have. A CPU
    serves all checkpoints in float32.
    """
    return (mx.float32,) if device == mx.cpu else (mx.float32, mx.bfloat16)


def _load_check(architecture: str, dtype: mx.Dtype, scratch: Path) -> Figures:
    """How the architecture would be served. Raises ModelError, and whatever the model raises."""
    _, execution = _load(architecture, dtype, scratch)
    mx.clear_cache()
    return {
        "batches": execution.batching.name,
        "attention": execution.attention.name,
        "deviation": execution.deviation,
        "rejected_before": len(execution.rejected),
    }


def _load(architecture: str, dtype: mx.Dtype, scratch: Path) -> tuple[LoadedModel, Execution]:
    """Load a tiny random checkpoint as the daemon does, and remove it. Raises ModelError."""
    with tempfile.TemporaryDirectory(dir=scratch) as parent:
        checkpoint = Path(parent) / "checkpoint"
        write_checkpoint(checkpoint, CONFIGS[architecture], _SEED, tiny_tokenizer(), dtype)
        loaded = open_model(checkpoint, host.examine().left_bytes)
        return loaded, load_weights(loaded, attentions("auto", loaded), lambda line: None)


def donation_cases(sizes: Sizes, scratch: Path) -> Cases:
    """Whether writes to the arena are in place while a step is in flight, for both launches, and
    whether those of compiled decodes are.

    A write is in place if MLX donates the pool's buffer to it, which it does while nothing else
    refers to the buffer; on a GPU, a step in flight may. The backend's choice of a launch for each
    device rests on this measurement. The cases raise TooLarge.
    """

    def measure(steps: Callable[[CachedModel, Launch], Figures], launch: Launch) -> Figures:
        return steps(_model_with_pools(sizes.pool_bytes, scratch), launch)

    return {
        "launched ahead": partial(measure, steps_in_flight, Launch.AHEAD),
        "launched when idle": partial(measure, steps_in_flight, Launch.WHEN_IDLE),
        "compiled, launched ahead": partial(measure, compiled_in_flight, Launch.AHEAD),
        "compiled, launched when idle": partial(measure, compiled_in_flight, Launch.WHEN_IDLE),
    }


def _model_with_pools(pool_bytes: int, scratch: Path) -> CachedModel:
    """A tiny model over an arena whose pools have about `pool_bytes` each. Raises TooLarge."""
    loaded, execution = _load(_DONATION_ARCHITECTURE, mx.float32, scratch)
    first = loaded.layout.kv_layers[0]
    block_bytes = BLOCK_SIZE * first.kv_heads * first.key_dim * first.key_dtype.size
    n_blocks = max(pool_bytes // block_bytes, ROWS * ROW_BLOCKS)
    arena_bytes = n_blocks * BLOCK_SIZE * token_bytes(loaded.layout.kv_layers)
    require_bytes(2 * arena_bytes)  # in case all pools are copied
    storage = Storage(loaded.layout, StorageSizes(n_blocks), BLOCK_SIZE)
    return CachedModel(loaded.model, loaded.layout, storage, execution)


def steps_in_flight(model: CachedModel, launch: Launch) -> dict[str, float]:
    """Run steps of one chunk and several decodes, each submitted before the last is collected."""
    runner = MlxRunner(model, Sampler(VOCAB_SIZE), launch)
    starts = range(PROMPT_TOKENS, PROMPT_TOKENS + STEPS * CHUNK_TOKENS, CHUNK_TOKENS)
    chunks = [Prefill(_NAMES[0], start, _tokens(CHUNK_TOKENS)) for start in starts]
    plans = [StepPlan(rows=[chunk, *map(Decode, _NAMES[1:])]) for chunk in chunks]
    return memory_of_steps(model, runner, plans)


def compiled_in_flight(model: CachedModel, launch: Launch) -> dict[str, float]:
    """Run compiled decodes, each submitted before the last is collected. Raises Unfit."""
    path, compiled = DecodePath(""), CompiledDecode(model, wanted_steps=1)
    path.use(compiled)
    runner = MlxRunner(model, Sampler(VOCAB_SIZE), launch, decode=path)
    plans = [StepPlan(rows=list(map(Decode, _NAMES))) for _ in range(STEPS)]
    figures = memory_of_steps(model, runner, plans)
    return {**figures, "compiled_steps": compiled.steps[""]}


def memory_of_steps(
    model: CachedModel, runner: MlxRunner, plans: Sequence[StepPlan]
) -> dict[str, float]:
    """Let `_NAMES` enter the batch and run these steps of theirs, each in flight when the next is
    submitted.

    Returns the size of one layer's pool of K; the peak above the memory in use before the batch was
    filled, and what MLX has kept for later, all in MiB; the larger of both over the pool; and the
    time of a step.
    """
    gc.collect()  # the model of an earlier case may still be there
    before = mx.get_active_memory()  # or what is kept from the first step on would not be seen
    runner.submit(_prompts(_NAMES))
    runner.sample(None)
    mx.synchronize()
    mx.clear_cache()  # or a copy would take the place of what is left of earlier work
    mx.reset_peak_memory()
    started = time.perf_counter()
    for plan in plans:
        runner.submit(plan)
        runner.collect()
        runner.sample(None)
    runner.collect()
    seconds = time.perf_counter() - started
    pool_bytes = model.storage.full.layers[0].planes[0].nbytes
    peak_bytes, cached_bytes = mx.get_peak_memory() - before, mx.get_cache_memory()
    return {
        "pool_mib": pool_bytes / 2**20,
        "peak_mib": peak_bytes / 2**20,
        "cached_mib": cached_bytes / 2**20,
        "pools_times": max(peak_bytes, cached_bytes) / pool_bytes,
        "step_ms": 1e3 * seconds / len(plans),
    }


def _prompts(names: Sequence[SequenceId]) -> StepPlan:
    """A plan in which all rows enter, get their tables, and compute their prompts."""
    entry = Sampling(SamplingParams(temperature=0), seed=0)
    return StepPlan(
        enter=[BatchEntry(name, entry) for name in names],
        patches=[
            (name, TablePatch(None, 0, tuple(range(ROW_BLOCKS * name, ROW_BLOCKS * (name + 1)))))
            for name in names
        ],
        rows=[Prefill(name, 0, _tokens(PROMPT_TOKENS), samples=True) for name in names],
    )


def _tokens(n_tokens: int) -> tuple[int, ...]:
    return tuple(37 * i % VOCAB_SIZE for i in range(n_tokens))
