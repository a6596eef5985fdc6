"""Whether a checkpoint's files are all there and whole, before any of them is loaded."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

from engine.api import ModelError

WEIGHTS = "model*.safetensors"  # other files may hold the same weights in another form
GENERATION_CONFIG = "generation_config.json"
INDEX = "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "*.tiktoken", "vocab.json")
"""What transformers makes a tokenizer of. Without any it makes an empty one and says nothing."""

_UNFINISHED = (
    "*.incomplete",
    ".cache/huggingface/download/*.incomplete",  # below a local directory
    "../../blobs/*.incomplete",  # beside a snapshot in the cache
)
_LFS_POINTER = b"version https://git-lfs"
_LENGTH_BYTES = 8  # of the header, little-endian, before it: safetensors' format
_NAMED = 3


class ByteSpan(NamedTuple):
    """Bytes of a file."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """A safetensors file's, and where in the file each tensor lies, by name."""

    text: bytes
    spans: Mapping[str, ByteSpan]


def check_files(checkpoint: Path) -> None:
    """Raise ModelError, a line that names the file, unless the checkpoint can be loaded from.

    Weights are judged by their sizes and headers; none are read.
    """
    _check_config(checkpoint)
    _check_generation_config(checkpoint)
    missing = _missing_weights(checkpoint)
    if missing:
        raise ModelError(f"incomplete download: {missing} (in {checkpoint})")
    if not any(checkpoint.glob(WEIGHTS)):
        raise ModelError(f"{checkpoint} has no {WEIGHTS}: not a checkpoint that MLX can load")
    if not any(file.exists() for pattern in TOKENIZERS for file in checkpoint.glob(pattern)):
        raise ModelError(f"{checkpoint} has no tokenizer: {TOKENIZERS[0]} is missing")


def _check_config(checkpoint: Path) -> None:
    file = checkpoint / "config.json"
    if not file.is_file():
        raise ModelError(f"{checkpoint} has no config.json: not a checkpoint")
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{file} names no model_type: not a model's configuration")


def _check_generation_config(checkpoint: Path) -> None:
    """mlx-lm forgives what is no JSON, but no other text and no JSON but an object."""
    file = checkpoint / GENERATION_CONFIG
    try:
        content = json.loads(file.read_text("utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is not a JSON object: delete it, or fetch it again")


def _missing_weights(checkpoint: Path) -> str:
    """Which weight files are not there, or "". Raises ModelError for those that are not whole.

    An index is believed where it names tensors that no file holds: some are out of date.
    """
    files = sorted(checkpoint.glob(WEIGHTS))
    held = {name for file in files if file.exists() for name in read_header(file).spans}
    indexed = _index(checkpoint)
    absent = {file.name for file in files if not file.exists()}  # links into an emptied cache
    absent |= {
        file
        for name, file in indexed.items()
        if name not in held and not (checkpoint / file).exists()
    }
    if absent:
        total = len({*indexed.values(), *(file.name for file in files)})
        verb = "is" if len(absent) == 1 else "are"
        return f"{len(absent)} of {total} weight files {verb} missing: {_named(sorted(absent))}"
    unfinished = [file.name for part in _UNFINISHED for file in checkpoint.glob(part)]
    if not files and unfinished:
        return f"the weights are missing, and partly fetched: {_named(unfinished)}"
    return ""


def read_header(file: Path) -> Header:
    """Raises ModelError unless the file is a safetensors file, and whole."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            raise ModelError(f"{file} is a Git LFS pointer, not the weights: run git lfs pull")
        length = int.from_bytes(start[:_LENGTH_BYTES], "little")
        opened.seek(_LENGTH_BYTES)
        text = opened.read(length) if length <= size else b""
    try:
        tensors: dict[str, Any] = json.loads(text)
        tensors.pop("__metadata__", None)
        first = _LENGTH_BYTES + length
        header = Header(text, {name: _span(tensors[name], first) for name in tensors})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"incomplete download, or no safetensors file: {file} has {size:,} bytes and no header"
        ) from error
    whole = max((span.stop for span in header.spans.values()), default=first)
    if size < whole:
        raise ModelError(f"incomplete download: {file} has {size:,} of {whole:,} bytes")
    return header


def _span(tensor: Mapping[str, Any], first: int) -> ByteSpan:
    """Where in its file a tensor lies; `first` is where the first one begins. Raises TypeError,
    LookupError or ValueError for what is no description of a tensor.
    """
    start, stop = map(index, tensor["data_offsets"])
    if not 0 <= start <= stop:
        raise ValueError(f"a tensor from {start} to {stop}")
    return ByteSpan(first + start, first + stop)


def _index(checkpoint: Path) -> dict[str, str]:
    """The file that each tensor is in; nothing where the index is missing or cannot be read."""
    try:
        named = json.loads((checkpoint / INDEX).read_text("utf-8"))["weight_map"]
        return {str(tensor): str(file) for tensor, file in named.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


def _named(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
