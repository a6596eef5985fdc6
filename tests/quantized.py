"""Tiny random checkpoints in each quantization that mlx-lm loads."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from measuring.random_checkpoint import CONFIGS
from tests.checkpoints import FAMILIES, Family, write_family

GROUP_SIZES = {"affine": 32, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16}

_MODES = [*(("affine", bits) for bits in (2, 3, 4, 5, 6, 8)), ("mxfp4", 4), ("mxfp8", 8)]
_MODES += [("nvfp4", 4)]

_TIED = {**CONFIGS["qwen3"], "tie_word_embeddings": True}
_LATENT = {
    **CONFIGS["deepseek_v3"],
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
"""Latent attention of which all sizes are multiples of a group, so that all of it is quantized."""

_KINDS = {
    "linear": CONFIGS["qwen3"],
    "tied": _TIED,  # the embedding makes the logits
    "experts": CONFIGS["qwen3_moe"],
    "biased": CONFIGS["gpt_oss"],  # linear layers and experts with biases
    "latent": _LATENT,
}


def _mode(name: str, bits: int) -> dict[str, Any]:
    return {"mode": name, "bits": bits, "group_size": GROUP_SIZES[name]}


def _everything(path: str, module: object) -> bool:
    """Quantizes routers of experts as the other layers, in place of mlx-lm's own rules."""
    return True


def _mixed(path: str, module: object) -> bool | dict[str, Any]:
    """Another quantization for each kind of layer, and some layers as they are."""
    if "v_proj" in path:
        return False
    if "down_proj" in path:
        return _mode("affine", 6)
    return _mode("mxfp4", 4) if "embed" in path else _mode("nvfp4", 4)


SCALED_EXPERTS = Family(
    "scaled-experts", CONFIGS["qwen3_moe"], {**_mode("nvfp4", 4), "global_scale": True}, _everything
)
"""Experts with one scale each in addition to those of their groups, as ModelOpt exports them."""

QUANTIZED = {
    family.name: family
    for family in (
        *(
            Family(f"{kind}-{name}-{bits}", config, _mode(name, bits), _everything)
            for kind, config in _KINDS.items()
            for name, bits in _MODES
        ),
        *(
            Family(f"mixed-{kind}", _KINDS[kind], _mode("nvfp4", 4), _mixed)
            for kind in ("tied", "experts", "latent")
        ),
    )
}


def write_quantized(family: Family, parent: Path, dtype: mx.Dtype = mx.float32) -> Path:
    """Write the family's checkpoint. Its biases are random, because those of new layers are 0."""
    checkpoint = write_family(family, parent, dtype=dtype)
    tensors = read_tensors(checkpoint)
    names = [name for name in tensors if name.endswith(".bias")]
    keys = mx.random.split(mx.random.key(1), max(len(names), 2))
    for name, key in zip(names, keys[: len(names)], strict=True):
        tensors[name] = mx.random.normal(tensors[name].shape, key=key).astype(tensors[name].dtype)
    _write_tensors(checkpoint, tensors)
    return checkpoint


def write_packed(
    parent: Path, method: str, *, zeros: bool = True, group_indices: bool = False
) -> Path:
    """Write a checkpoint as AutoAWQ packs it, which mlx-lm converts when it loads it."""
    checkpoint = parent / f"{method}-{zeros}"
    shutil.copytree(write_family(FAMILIES["llama"], parent, dtype=mx.float16), checkpoint)
    rng = np.random.default_rng(0)
    tensors = {}
    for name, array in read_tensors(checkpoint).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = array
            continue
        path, (outputs, inputs) = name.removesuffix(".weight"), array.shape
        groups = inputs // 32
        codes = rng.integers(0, 1 << 32, (inputs, outputs // 8), np.uint32)
        tensors[f"{path}.qweight"] = mx.array(codes).view(mx.int32)
        scales = rng.uniform(0.01, 0.04, (groups, outputs))
        tensors[f"{path}.scales"] = mx.array(scales).astype(mx.float16)
        if zeros:
            points = rng.integers(0x66666666, 0x99999999, (groups, outputs // 8), np.uint32)
            tensors[f"{path}.qzeros"] = mx.array(points).view(mx.int32)
        if group_indices:
            tensors[f"{path}.g_idx"] = mx.arange(inputs) // 32
    _write_tensors(checkpoint, tensors)
    configure(checkpoint, quantization_config={"quant_method": method, "bits": 4, "group_size": 32})
    return checkpoint


def configure(checkpoint: Path, **settings: object) -> None:
    """Change a checkpoint's config.json."""
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | settings), "utf-8")


def read_tensors(checkpoint: Path) -> dict[str, mx.array]:
    """The tensors of a checkpoint of one file."""
    tensors = mx.load(str(checkpoint / "model.safetensors"))
    assert isinstance(tensors, dict)
    mx.eval(tensors)
    return tensors


def _write_tensors(checkpoint: Path, tensors: dict[str, mx.array]) -> None:
    mx.save_safetensors(str(checkpoint / "model.safetensors"), tensors, {"format": "mlx"})
