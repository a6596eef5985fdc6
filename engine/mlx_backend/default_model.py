"""The embedded default: a tiny random model, so that the daemon runs before anything is fetched."""

import sys
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from engine.mlx_backend.checkpoint import train_tokenizer, write_checkpoint

_VOCAB_SIZE = 1024
_CONFIG: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": _VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "float16",
}
_NAME = "default-1"  # counts up when what is written changes


def default_checkpoint(cache_directory: Path) -> Path:
    """The default's directory, written at the first call: about 430,000 parameters, 1 MB."""
    directory = cache_directory / _NAME
    if not directory.exists():
        tokenizer = train_tokenizer(own_text(), _VOCAB_SIZE)
        write_checkpoint(directory, _CONFIG, seed=0, tokenizer=tokenizer)
    return directory


def user_cache_directory() -> Path:
    """Where this platform keeps what a program can make again."""
    caches = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path.home() / caches / "rootstock"


def own_text() -> list[str]:
    """The project's own source files."""
    return [
        file.read_text(encoding="utf-8")
        for package in ("server", "engine", "kvstore")
        for file in _python_files(files(package))
    ]


def _python_files(directory: Traversable) -> list[Traversable]:
    found: list[Traversable] = []
    for entry in sorted(directory.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            found += _python_files(entry)
        elif entry.name.endswith(".py"):
            found.append(entry)
    return found
