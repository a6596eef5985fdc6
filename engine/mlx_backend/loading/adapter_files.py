"""Reads adapters as mlx-lm writes them: a folder with a configuration and low-rank matrices."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
from blake3 import blake3
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from engine.api import ModelError, one_line
from engine.mlx_backend.loading.checkpoint import read_header
from engine.mlx_backend.loading.purpose import read_json
from engine.mlx_backend.model.patches import Adapter, LowRank
from engine.values.settings import AdapterConfig

CONFIG = "adapter_config.json"
WEIGHTS = "adapters.safetensors"

_A, _B = "lora_a", "lora_b"


def read_adapters(
    configs: Sequence[AdapterConfig], model: Module, vocab_size: int
) -> tuple[Adapter, ...]:
    """The adapters in these folders, for this model. Their matrices are lazy arrays. Raises
    ModelError, which names the adapter and its fault.
    """
    modules = dict(model.named_modules())
    adapters = []
    for config in configs:
        try:
            adapters.append(_read(config, modules, vocab_size))
        except OSError as error:
            problem = f"cannot read {error.filename}: {error.strerror}"
            raise ModelError(f"adapter {config.name}: {problem}") from error
        except ModelError as error:
            raise ModelError(f"adapter {config.name}: {error}") from error
    return tuple(adapters)


def _read(config: AdapterConfig, modules: Mapping[str, Module], vocab_size: int) -> Adapter:
    """One adapter. Its fingerprint, 16 hexadecimal digits, changes with either file: both are read
    completely. Raises ModelError or OSError.
    """
    directory = config.directory
    if not directory.is_dir():
        raise ModelError(f"there is no directory {directory.absolute()}")
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise ModelError(f"{directory} has no {name}: no adapter as mlx-lm writes them")
    scale = _scale(directory / CONFIG)
    weights = _weights(directory / WEIGHTS)
    added = {}
    for path in dict.fromkeys(key.rpartition(".")[0] for key in weights):
        inputs, outputs = _shape(path, modules, vocab_size)
        pair = []
        for key in (f"{path}.{_A}", f"{path}.{_B}"):
            if key not in weights:
                raise ModelError(f"{key} is missing")
            if weights[key].ndim != 2:
                raise ModelError(f"{key} has the shape {weights[key].shape}, and is no matrix")
            pair.append(weights[key])
        a, b = pair
        for name, matrix, shape in ((_A, a, (inputs, b.shape[0])), (_B, b, (a.shape[1], outputs))):
            if matrix.shape != shape:
                raise ModelError(
                    f"{path}.{name} has the shape {matrix.shape}; with this model it is {shape}"
                )
        added[path] = LowRank(modules[path], a, b, scale)
    digest = blake3()
    for name in (CONFIG, WEIGHTS):
        digest.update((directory / name).stat().st_size.to_bytes(8, "little"))
        digest.update_mmap(directory / name)
    return Adapter(config.name, digest.hexdigest(length=8), added)


def _scale(file: Path) -> float:
    """The factor of the product of the matrices, in an adapter's configuration."""
    config = read_json(file, dict) or {}
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise ModelError(f"{file} has the fine_tune_type {kind!r}; only lora is served")
    parameters = config.get("lora_parameters")
    scale = parameters.get("scale") if isinstance(parameters, dict) else None
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ModelError(f"{file} has no number at lora_parameters.scale")
    return float(scale)


def _weights(file: Path) -> dict[str, mx.array]:
    """The lazy matrices of a LoRA by their keys, which end in "lora_a" or "lora_b"."""
    if not read_header(file).tensors:
        raise ModelError(f"{file} has no tensors")
    try:
        weights = mx.load(str(file))
    except (RuntimeError, ValueError) as error:  # of a type that MLX does not have
        raise ModelError(f"{file} cannot be read: {one_line(error)}") from error
    assert isinstance(weights, dict), "what is in a safetensors file has names"
    for key in weights:
        if key.rpartition(".")[2] not in {_A, _B}:
            raise ModelError(f"{key} is no matrix of a LoRA: it ends neither in {_A} nor in {_B}")
    return weights


def _shape(path: str, modules: Mapping[str, Module], vocab_size: int) -> tuple[int, int]:
    """The inputs and outputs of a projection. Raises ModelError if adapters cannot change it."""
    if path not in modules:
        raise ModelError(f"{path}: the model has no such layer")
    module = modules[path]
    if not isinstance(module, Linear | QuantizedLinear):
        kind = type(module).__name__
        raise ModelError(f"{path} is no linear layer but {kind}: its adapters are not served")
    outputs, inputs = module.weight.shape
    if outputs == vocab_size:
        raise ModelError(f"{path} makes the logits: its adapters are not served")
    if isinstance(module, QuantizedLinear):
        inputs = inputs * 32 // module.bits
    return inputs, outputs
