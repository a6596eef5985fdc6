"""The matrix: what is built and served, each in a process of its own."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.convert import convert

from measuring.random_checkpoint import CONFIGS, tiny_tokenizer, write_checkpoint

_QUANTIZED = ("llama", "gemma3_text", "qwen3_next")
_QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "4 bit": {"q_bits": 4},
    "8 bit": {"q_bits": 8},
    "mixed 4 and 6 bit": {"q_bits": 4, "quant_predicate": "mixed_4_6"},
}


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint to serve: a config and, if it is quantized, mlx_lm.convert's options."""

    name: str
    config: Mapping[str, Any]
    conversion: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_variant(self) -> bool:
        """Whether it is one more checkpoint of an architecture that is a case itself."""
        return bool(self.name != self.config["model_type"])

    def write(self, parent: Path) -> Path:
        """Write its checkpoint below `parent`, which must not hold it yet."""
        plain = parent / "plain"
        try:
            write_checkpoint(plain, self.config, 0, tiny_tokenizer(), mx.float32)
        except SystemExit:  # a module that exits on import: let the loader say so
            _write_hollow(plain, self.config)
        if not self.conversion:
            return plain
        quantized = parent / "quantized"
        convert(str(plain), str(quantized), quantize=True, q_group_size=32, **self.conversion)
        return quantized


def _write_hollow(directory: Path, config: Mapping[str, Any]) -> None:
    """A checkpoint with nothing in it."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    mx.save_safetensors(str(directory / "model.safetensors"), {})


CASES = {
    case.name: case
    for case in (
        *(Case(name, config) for name, config in CONFIGS.items()),
        *(
            Case(f"{name}, {words}", CONFIGS[name], conversion)
            for name in _QUANTIZED
            for words, conversion in _QUANTIZATIONS.items()
        ),
    )
}
