"""What a checkpoint's files say of its model, whether or not the model is loaded. Without MLX."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from blake3 import blake3

from engine.api import ModelError
from engine.mlx_backend.errors import one_line
from engine.mlx_backend.loading.checkpoint_files import WEIGHTS, read_header
from engine.mlx_backend.loading.generation_config import sampling_defaults
from engine.mlx_backend.loading.purpose import find_purpose
from engine.mlx_backend.loading.source import FILES, find_checkpoint
from engine.text.python_templates import python_template
from engine.values.model import SamplingDefaults, Task

_CONTEXT_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "n_positions",
    "seq_length",
    "max_seq_len",  # DBRX
    "max_context_length",  # OpenELM
    "model_max_length",  # Kimi Linear
)
_DIMENSION_KEYS = ("hidden_size", "n_embd", "d_model", "dim", "model_dim")
_DEFAULT_CONTEXT_TOKENS = 4096
_DEFAULT_GROUP_SIZE = 64  # MLX's

_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*(?=\[)')
"""Where the list begins in a tokenizer.json. Most of that file is the vocabulary: megabytes, whose
parsing would keep other threads waiting.
"""


class Checkpoint:
    """A checkpoint's directory, whose files are whole. Each property reads what it needs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return _json_object(self._directory / "config.json")

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits, which depend on config.json and on all files' names and sizes.

        Weights are not read, so a model and its fine-tune may have the same digest.
        """
        digest = blake3((self._directory / "config.json").read_bytes())
        for name, size in sorted(self._sizes.items()):
            digest.update(f"{name}:{size}\n".encode())
        return digest.hexdigest()

    @property
    def n_bytes(self) -> int:
        """The size of all files that loading reads."""
        return sum(self._sizes.values())

    @property
    def modified(self) -> datetime:
        return datetime.fromtimestamp((self._directory / "config.json").stat().st_mtime, UTC)

    @property
    def max_context_tokens(self) -> int:
        return max_context_tokens(self.config)

    @property
    def dimensions(self) -> int | None:
        """The size of a hidden state; None where config.json does not say."""
        return first_number(self.config, _DIMENSION_KEYS)

    @cached_property
    def n_parameters(self) -> int | None:
        """How many numbers the weights have; None where they are quantized in a format that is not
        MLX's.
        """
        quantization = self.config.get("quantization") or {}
        if not quantization and self.config.get("quantization_config"):
            return None
        shapes = self._shapes()
        return sum(_parameters(name, shape, shapes, quantization) for name, shape in shapes.items())

    @cached_property
    def chat_template(self) -> str:
        """The template's source, as the loaded tokenizer has it: all templates where there are
        several, "" where there are none.
        """
        kind = self._tokenizer_config.get("chat_template_type")
        if kind and (file := python_template(str(kind))).is_file():
            return file.read_text("utf-8")
        return "\n".join(self._jinja_templates())

    @property
    def tokenizer_class(self) -> str | None:
        """As tokenizer_config.json has it."""
        name = self._tokenizer_config.get("tokenizer_class")
        return str(name) if name else None

    @cached_property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of special tokens by their names in tokenizer_config.json: `bos_token` and others.
        A text stands there alone, or as the `content` of an object.
        """
        found = dict[str, str]()
        for name, token in self._tokenizer_config.items():
            content = token.get("content") if isinstance(token, Mapping) else token
            if name.endswith("_token") and isinstance(content, str):
                found[name] = content
        return found

    @cached_property
    def added_tokens(self) -> Collection[str]:
        """The tokens that a tokenizer has besides pieces of text."""
        listed = self._tokenizer_config.get("added_tokens_decoder") or {}
        return {str(token.get("content")) for token in (*self._added_tokens(), *listed.values())}

    def tasks(self, pooling: str, reranker: str) -> Sequence[Task]:
        """What the model is served for with these settings. Raises ModelError where it cannot be
        served.
        """
        purpose = find_purpose(self._directory, pooling, reranker)
        served = (
            (Task.GENERATE, purpose.generates),
            (Task.EMBED, purpose.embedding is not None),
            (Task.RERANK, purpose.ranking is not None),
        )
        return tuple(task for task, is_served in served if is_served)

    def sampling(self) -> SamplingDefaults:
        """What generation_config.json says; values that cannot be used are left out."""
        return sampling_defaults(self._directory, lambda line: None)

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        """The sizes in bytes of the files that loading reads, by name."""
        found = {file for pattern in FILES for file in self._directory.glob(pattern)}
        return {file.name: file.stat().st_size for file in found if file.is_file()}

    @cached_property
    def _tokenizer_config(self) -> Mapping[str, Any]:
        file = self._directory / "tokenizer_config.json"
        return _json_object(file) if file.is_file() else {}

    def _jinja_templates(self) -> list[str]:
        """The templates in files; where there are none, those in tokenizer_config.json, as in
        transformers.
        """
        files = [self._directory / "chat_template.jinja"]
        files += (self._directory / "additional_chat_templates").glob("*.jinja")
        if texts := [file.read_text("utf-8") for file in files if file.is_file()]:
            return texts
        match self._tokenizer_config.get("chat_template"):
            case str(text):
                return [text]
            case list(named):
                return [str(one.get("template", "")) for one in named]
            case dict(named):
                return [str(text) for text in named.values()]
            case _:
                return []

    def _added_tokens(self) -> Sequence[Mapping[str, Any]]:
        """The added tokens of tokenizer.json."""
        file = self._directory / "tokenizer.json"
        text = file.read_text("utf-8") if file.is_file() else ""
        if (found := _ADDED_TOKENS.search(text)) is None:
            return ()
        try:
            tokens: list[Mapping[str, Any]] = json.JSONDecoder().raw_decode(text, found.end())[0]
        except ValueError as error:
            raise ModelError(f"{file} cannot be read: {one_line(error)}") from error
        return tokens

    def _shapes(self) -> Mapping[str, Sequence[int]]:
        """The shapes of all tensors, by name."""
        shapes: dict[str, Sequence[int]] = {}
        for file in self._directory.glob(WEIGHTS):
            header = read_header(file)
            tensors = json.loads(header.text)
            shapes |= {name: tensors[name]["shape"] for name in header.spans}
        return shapes


def open_checkpoint(model: str) -> Checkpoint:
    """The checkpoint of a directory, of a repository that has been fetched, or the embedded one.

    Raises ModelError where there is none, or a file is missing or not whole.
    """
    return Checkpoint(find_checkpoint(model, download=False))


def max_context_tokens(config: Mapping[str, Any]) -> int:
    """The context length of a config.json, also of one that nests its text model."""
    found = first_number(config, _CONTEXT_KEYS)
    return _DEFAULT_CONTEXT_TOKENS if found is None else found


def first_number(config: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    """The first of these fields of a config.json that is an integer, its text model's after its
    own. A `text_config` that is not an object counts as absent.
    """
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, Mapping) else {}):
        for key in keys:
            if isinstance(part.get(key), int):
                return int(part[key])
    return None


def _parameters(
    name: str,
    shape: Sequence[int],
    shapes: Mapping[str, Sequence[int]],
    quantization: dict[str, Any],
) -> int:
    """How many numbers of the model a tensor stands for. MLX packs several into one of `weight`,
    and keeps `scales` and perhaps `biases` for each group.
    """
    layer, _, kind = name.rpartition(".")
    scales = shapes.get(f"{layer}.scales")
    if scales is None or f"{layer}.weight" not in shapes:
        return prod(shape)
    if kind != "weight":
        return 0 if kind in {"scales", "biases"} else prod(shape)
    own = quantization.get(layer)
    settings = quantization | own if isinstance(own, dict) else quantization
    return prod(scales) * int(settings.get("group_size", _DEFAULT_GROUP_SIZE))


def _json_object(file: Path) -> Mapping[str, Any]:
    """Raises ModelError for a file that is no JSON object."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is not a JSON object")
    return content
