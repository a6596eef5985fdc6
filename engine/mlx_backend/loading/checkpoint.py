"""Checks that a checkpoint's files are whole, and reads what they state about the model.

Imports no MLX, because the server uses this module, too.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from math import prod
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from engine.api import ModelError, one_line
from engine.mlx_backend.loading.purpose import (
    GENERATION_CONFIG,
    MOST_STATED,
    find_purpose,
    read_json,
    sampling_defaults,
)
from engine.text.templates import python_template
from engine.values.model import SamplingDefaults, Task

DEFAULT_CHECKPOINT = Path(__file__).parents[2] / "demo_model"
"""The embedded default: the demonstration model, which `tools/train_demo_model.py` trains."""

WEIGHTS = "model*.safetensors"  # other files may hold the same weights in another form
_VOCABULARIES = ("tokenizer.model", "*.tiktoken", "tiktoken.model")
FILES = ["*.json", WEIGHTS, *_VOCABULARIES, "*.txt", "*.jsonl", "*.jinja"]
_TOKENIZERS = ("tokenizer.json", *_VOCABULARIES, "vocab.json")
"""The files that transformers makes a tokenizer of. Without any of them it makes an empty one,
silently.
"""

_INDEX = "model.safetensors.index.json"
_UNFINISHED = (
    "*.incomplete",
    ".cache/huggingface/download/*.incomplete",  # below a local directory
    "../../blobs/*.incomplete",  # of a snapshot in the cache
)
_LFS_POINTER = b"version https://git-lfs"
_LENGTH_BYTES = 8  # before a safetensors header: its length, little-endian
_MOST_NAMES = 3


def checked(checkpoint: Path) -> Path:
    """The checkpoint. Raises ModelError, with one line that names the file, if it cannot be loaded.

    Weights are judged by their sizes and headers, and not read. mlx-lm ignores a
    generation_config.json that is not JSON, but fails at other encodings and at JSON that is not an
    object.
    """
    try:
        config = read_json(checkpoint / "config.json", dict)
        if config is None:
            inner = checkpoints_in(checkpoint)
            hint = f"; did you mean one of those in it: {listed(inner)}?" if inner else ""
            raise ModelError(f"{checkpoint} has no config.json: not a checkpoint{hint}")
        if not isinstance(config.get("model_type"), str):
            raise ModelError(f"{checkpoint / 'config.json'} names no model_type: not a model's")
        try:
            read_json(checkpoint / GENERATION_CONFIG, dict)
        except ModelError as error:
            if not isinstance(error.__cause__, json.JSONDecodeError):
                raise
        if missing := _missing_weights(checkpoint):
            raise ModelError(f"incomplete download: {missing} (in {checkpoint})")
        if not any(checkpoint.glob(WEIGHTS)):
            raise ModelError(f"{checkpoint} has no {WEIGHTS}: not a checkpoint that MLX can load")
        if not any(file.exists() for pattern in _TOKENIZERS for file in checkpoint.glob(pattern)):
            raise ModelError(f"{checkpoint} has no tokenizer: {_TOKENIZERS[0]} is missing")
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {error.strerror}") from error
    return checkpoint


def _missing_weights(checkpoint: Path) -> str:
    """Describes the weight files that are missing; "" if none are. Raises ModelError for files that
    are not whole.

    The index counts only for tensors that are in no file, because some indexes are out of date.
    """
    files = sorted(checkpoint.glob(WEIGHTS))
    held = {name for file in files if file.exists() for name in read_header(file).tensors}
    indexed: dict[str, str] = {}
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        indexed = dict(json.loads((checkpoint / _INDEX).read_text("utf-8"))["weight_map"].items())
    absent = {file.name for file in files if not file.exists()}  # links into an emptied cache
    missing = (str(file) for tensor, file in indexed.items() if tensor not in held)
    absent.update(file for file in missing if not (checkpoint / file).exists())
    if absent:
        total = len({*map(str, indexed.values()), *(file.name for file in files)})
        verb = "is" if len(absent) == 1 else "are"
        return f"{len(absent)} of {total} weight files {verb} missing: {listed(sorted(absent))}"
    unfinished = [file.name for part in _UNFINISHED for file in checkpoint.glob(part)]
    if not files and unfinished:
        return f"the weights are missing, and partly fetched: {listed(unfinished)}"
    return ""


def checkpoints_in(directory: Path) -> list[str]:
    """The names of the folders in a directory that have a config.json."""
    with suppress(OSError, RuntimeError):
        return sorted(file.parent.name for file in directory.expanduser().glob("*/config.json"))
    return []


def listed(names: Sequence[str]) -> str:
    """The first names, for a message."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


class Tensor(NamedTuple):
    """A tensor of a safetensors file: its bytes in the file, and its shape."""

    start: int
    stop: int
    shape: tuple[int, ...]


class Header(NamedTuple):
    """The header of a safetensors file: its bytes, and the tensors by name."""

    text: bytes
    tensors: Mapping[str, Tensor]


def read_header(file: Path) -> Header:
    """Read the header of a safetensors file. The format is described at
    https://huggingface.co/docs/safetensors. Raises ModelError unless the file is one, and whole.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        beginning = opened.read(len(_LFS_POINTER))
        if beginning == _LFS_POINTER:
            raise ModelError(f"{file} is a Git LFS pointer, not the weights: run git lfs pull")
        length = int.from_bytes(beginning[:_LENGTH_BYTES], "little")
        opened.seek(_LENGTH_BYTES)
        text = opened.read(length) if length <= size else b""
    first = whole = _LENGTH_BYTES + length
    tensors: dict[str, Tensor] = {}
    try:
        content: dict[str, Any] = json.loads(text)
        content.pop("__metadata__", None)
        for name, tensor in content.items():
            start, stop = map(index, tensor["data_offsets"])
            if not 0 <= start <= stop:
                raise ValueError(f"a tensor from {start} to {stop}")
            tensors[name] = Tensor(first + start, first + stop, tuple(map(index, tensor["shape"])))
            whole = max(whole, first + stop)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"incomplete download, or no safetensors file: {file} has {size:,} bytes and no header"
        ) from error
    if size < whole:
        raise ModelError(f"incomplete download: {file} has {size:,} of {whole:,} bytes")
    return Header(text, tensors)


_SAMPLES, _SAMPLE_BYTES = 4, 4096  # of a tensor
_BLOBS = "blobs"  # the folder of files in a repository's folder of the Hugging Face cache
_SHA256 = re.compile("[0-9a-f]{64}")  # small files outside of LFS have 40 digits, git's SHA-1


def file_version(file: Path) -> str:
    """The SHA-256 by which the Hugging Face cache names the file that a snapshot links to. Of any
    other file it is the time of modification, in nanoseconds: a copy that does not keep it counts
    as another model, which costs the disk cache and is never wrong.
    """
    blob = file.resolve()
    if blob.parent.name == _BLOBS and _SHA256.fullmatch(blob.name):
        return blob.name
    return str(blob.stat().st_mtime_ns)


def fingerprint(checkpoint: Path, version_of: Callable[[Path], str] = file_version) -> str:
    """Sixteen hexadecimal digits that change with the config or the weights.

    They digest config.json, and the name, size, header and version of each weight file, and
    samples of every tensor, because reading a whole checkpoint would take minutes. The samples find
    most edits that keep the version: of a file in the Hugging Face cache that was edited in place,
    or of a file whose time of modification was set back.

    A tensor's samples are both ends and places evenly between, because part of a tensor that joins
    several, such as Q, K and V or experts, may change alone. Raises ModelError for a file that is
    not whole.
    """
    digest = blake3((checkpoint / "config.json").read_bytes())
    for file in sorted(checkpoint.glob(WEIGHTS)):
        header = read_header(file)
        digest.update(f"{file.name}:{file.stat().st_size}:{version_of(file)}:".encode())
        digest.update(header.text)
        with file.open("rb") as weights:
            for start, stop, _ in sorted(header.tensors.values()):
                samples, sample_bytes = _SAMPLES, _SAMPLE_BYTES
                free_bytes = stop - start - sample_bytes
                if free_bytes <= (samples - 1) * sample_bytes:  # all of a small tensor
                    samples, sample_bytes, free_bytes = 1, stop - start, 0
                for sample in range(samples):
                    weights.seek(start + sample * free_bytes // max(samples - 1, 1))
                    digest.update(weights.read(sample_bytes))
    return digest.hexdigest(length=8)


_CONTEXT_KEYS = (
    *("max_position_embeddings", "max_sequence_length", "n_positions", "seq_length"),
    "max_seq_len",  # DBRX
    "max_context_length",  # OpenELM
    "model_max_length",  # Kimi Linear
)
_DIMENSION_KEYS = ("hidden_size", "n_embd", "d_model", "dim", "model_dim")
_TEXT_MODELS = ("text_config", "llm_config", "language_config")
"""Where a config.json has the fields of its text model, if not at the top."""

_DEFAULT_GROUP_SIZE = 64  # MLX's

_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*(?=\[)')
"""The beginning of that list in a tokenizer.json. Most of the file is the vocabulary, and parsing
megabytes would make other threads wait.
"""


class Checkpoint:
    """What the files of a checkpoint state about the model. The files are whole. Each property
    reads what it needs, and may raise ModelError.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_json(self._directory / "config.json", dict) or {}

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits that depend on config.json and on the names and sizes of all files.
        A model and its fine-tune may have the same digest.
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
    def license(self) -> str:
        """The `license` at the beginning of README.md, where Hugging Face has it, such as
        apache-2.0; "" if there is none.
        """
        try:
            text = (self._directory / "README.md").read_text("utf-8")
        except (OSError, UnicodeDecodeError):  # no weights depend on it
            return ""
        before, _, rest = text.partition("---\n")
        front, closing, _ = rest.partition("\n---\n")
        found = re.search(r"^license: *([\w.-]+) *$", front, re.MULTILINE)
        return found[1] if found and closing and not before else ""

    @property
    def modified(self) -> datetime:
        return datetime.fromtimestamp((self._directory / "config.json").stat().st_mtime, UTC)

    @property
    def max_context_tokens(self) -> int | None:
        """None where config.json states no length."""
        return max_context_tokens(self.config)

    @property
    def dimensions(self) -> int | None:
        """The size of a hidden state; None where config.json does not have it."""
        return first_number(self.config, _DIMENSION_KEYS)

    @cached_property
    def n_parameters(self) -> int | None:
        """Numbers in the weights; None if they are quantized in a format that is not MLX's."""
        quantization = self.config.get("quantization") or {}
        if not quantization and self.config.get("quantization_config"):
            return None
        shapes = {
            name: tensor.shape
            for file in self._directory.glob(WEIGHTS)
            for name, tensor in read_header(file).tensors.items()
        }
        return sum(_parameters(name, shapes, quantization) for name in shapes)

    @cached_property
    def chat_template(self) -> str:
        """The source of the loaded tokenizer's template; of all templates if there are several."""
        kind = self._tokenizer_config.get("chat_template_type")
        if kind and (file := python_template(str(kind))).is_file():
            return file.read_text("utf-8")
        files = [self._directory / "chat_template.jinja"]
        files += (self._directory / "additional_chat_templates").glob("*.jinja")
        texts = [file.read_text("utf-8") for file in files if file.is_file()]
        if not texts:  # as in transformers
            match self._tokenizer_config.get("chat_template"):
                case str(text):
                    texts = [text]
                case list(named):
                    texts = [str(one.get("template", "")) for one in named]
                case dict(named):
                    texts = list(map(str, named.values()))
        return "\n".join(texts) or self.processor_template

    @cached_property
    def processor_template(self) -> str:
        """The template in chat_template.json, where the processor of a model with images has it;
        "" if there is none. transformers does not give it to the tokenizer.
        """
        content = read_json(self._directory / "chat_template.json", dict) or {}
        template = content.get("chat_template")
        return template if isinstance(template, str) else ""

    @property
    def tokenizer_class(self) -> str | None:
        """The tokenizer's class in tokenizer_config.json."""
        name = self._tokenizer_config.get("tokenizer_class")
        return str(name) if name else None

    @cached_property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of special tokens by their names in tokenizer_config.json, such as `bos_token`."""
        texts = {
            name: token.get("content") if isinstance(token, dict) else token
            for name, token in self._tokenizer_config.items()
            if name.endswith("_token")
        }
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    @cached_property
    def added_tokens(self) -> Collection[str]:
        """The tokens that a tokenizer has in addition to pieces of text."""
        listed: list[Mapping[str, Any]] = []
        file = self._directory / "tokenizer.json"
        text = file.read_text("utf-8") if file.is_file() else ""
        if found := _ADDED_TOKENS.search(text):
            try:
                listed += json.JSONDecoder().raw_decode(text, found.end())[0]
            except ValueError as error:
                raise ModelError(f"{file} cannot be read: {one_line(error)}") from error
        listed += (self._tokenizer_config.get("added_tokens_decoder") or {}).values()
        return {str(token.get("content")) for token in listed}

    def tasks(self, pooling: str, reranker: str) -> Sequence[Task]:
        """What the model is served for with these settings. Raises ModelError for nothing."""
        purpose = find_purpose(self._directory, pooling, reranker)
        served = (
            (Task.GENERATE, purpose.generates),
            (Task.EMBED, purpose.embedder is not None),
            (Task.RERANK, purpose.ranking is not None),
        )
        return tuple(task for task, is_served in served if is_served)

    def sampling(self) -> SamplingDefaults:
        """The parameters in generation_config.json; unusable values are left out."""
        return sampling_defaults(self._directory, lambda line: None)

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        """The sizes in bytes of the files that loading reads, by name."""
        found = {file for pattern in FILES for file in self._directory.glob(pattern)}
        return {file.name: file.stat().st_size for file in found if file.is_file()}

    @cached_property
    def _tokenizer_config(self) -> dict[str, Any]:
        return read_json(self._directory / "tokenizer_config.json", dict) or {}


def max_context_tokens(config: Mapping[str, Any]) -> int | None:
    """The context length of a config.json, also of one that nests its text model; None where it
    states none, as those of most recurrent models do.
    """
    return first_number(config, _CONTEXT_KEYS)


def first_number(config: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    """The first of these fields of a config.json that is a number above zero, perhaps written as
    `1e6` or as text. Fields of its text model come after its own.
    """
    nested = (config.get(name) for name in _TEXT_MODELS)
    for part in (config, *(each for each in nested if isinstance(each, Mapping))):
        for key in keys:
            if found := _number(part.get(key)):
                return found
    return None


def _number(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return int(number) if 1 <= number < MOST_STATED else None


def _parameters(
    name: str, shapes: Mapping[str, Sequence[int]], quantization: dict[str, Any]
) -> int:
    """How many numbers of the model a tensor holds. When MLX quantizes, it packs several numbers
    into one of `weight`, and adds `scales` and perhaps `biases` for each group of numbers.
    """
    layer, _, kind = name.rpartition(".")
    scales = shapes.get(f"{layer}.scales")
    kinds = {"weight", "scales", "biases"}
    if scales is None or f"{layer}.weight" not in shapes or kind not in kinds:
        return prod(shapes[name])
    if kind != "weight":
        return 0
    own = quantization.get(layer)
    settings = quantization | own if isinstance(own, dict) else quantization
    return prod(scales) * int(settings.get("group_size", _DEFAULT_GROUP_SIZE))
