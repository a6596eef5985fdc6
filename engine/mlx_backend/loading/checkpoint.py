"""What a checkpoint's files say of its model, whether or not the model is loaded. Without MLX."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from math import prod
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from engine.api import ModelError, Progress
from engine.mlx_backend.errors import one_line
from engine.mlx_backend.loading.purpose import GENERATION_CONFIG, find_purpose, sampling_defaults
from engine.text.python_templates import python_template
from engine.values.model import SamplingDefaults, Task
from engine.values.settings import DEFAULT_NAME

WEIGHTS = "model*.safetensors"  # other files may hold the same weights in another form
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


DEFAULT_CHECKPOINT = Path(__file__).parents[2] / "demo_model"
"""The embedded default: the demonstration model that `tools/train_demo_model.py` trained."""

_PATH_STARTS = ("/", ".", "~")  # of no repository's name
FILES = ["*.json", WEIGHTS, "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja"]
_SAMPLES = 4  # of a tensor
_SAMPLE_BYTES = 4096
_BLOBS = "blobs"  # the folder of files in a repository's folder of the Hugging Face cache
_SHA256 = re.compile("[0-9a-f]{64}")  # small files outside of LFS have 40 digits, git's SHA-1
_STORED_BYTES = "huggingface_hub.snapshot_download"  # the name of one of a download's bars


def find_checkpoint(
    model: str, *, download: bool, progress: Progress = lambda done, total: None
) -> Path:
    """The directory of a checkpoint given as a directory or as a Hugging Face repository; of the
    embedded default where `model` is empty, or its name.

    What begins with `/`, `.` or `~` is a directory. Without `download` a repository must have been
    fetched before; `progress` is called from other threads. Code in repositories is neither fetched
    nor run. Raises ModelError, also when a file is missing or not whole.
    """
    return local_checkpoint(model) or _checked(
        _fetched(model, progress) if download else _cached(model)
    )


def local_checkpoint(model: str) -> Path | None:
    """The checkpoint of a directory, or the embedded default; None for a repository.

    Raises ModelError as find_checkpoint does.
    """
    if model in {"", DEFAULT_NAME}:
        return DEFAULT_CHECKPOINT
    directory = _directory(model)
    return None if directory is None else _checked(directory)


def fetch_checkpoint(repository: str, progress: Progress) -> Path:
    """The directory of a checkpoint that is fetched from Hugging Face, if it is not there yet.

    `progress` is called from other threads. Raises ModelError as find_checkpoint does.
    """
    return _checked(_fetched(repository, progress))


def _directory(model: str) -> Path | None:
    """None where it may be a repository. Raises ModelError for files, and for paths to nothing."""
    try:
        path = Path(model).expanduser()
        is_directory, is_there = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # of `~nobody`
        raise ModelError(f"{model} cannot be looked for: {one_line(error)}") from error
    if is_directory:
        return path
    if is_there:
        raise ModelError(f"{model} is a file; a model is a directory or a repository")
    if model.startswith(_PATH_STARTS):
        raise ModelError(f"there is no directory {path.resolve()}")
    return None


def _cached(model: str) -> Path:
    """Raises ModelError unless the repository has been fetched."""
    try:
        return Path(snapshot_download(model, allow_patterns=FILES, local_files_only=True))
    except HFValidationError as error:
        raise _no_repository(model, error) from error
    except OSError as error:
        fetch = f"`rootstock pull {model}` fetches it"
        raise ModelError(f"{model} is not in the Hugging Face cache; {fetch}") from error


def _fetched(model: str, progress: Progress) -> Path:
    """Raises ModelError when the repository is not in the cache, and cannot be fetched either."""
    try:
        bar = _counting(progress)
        return Path(snapshot_download(model, allow_patterns=FILES, tqdm_class=bar))
    except GatedRepoError as error:
        raise ModelError(
            f"{model} is gated: HF_TOKEN or `hf auth login` must name an account that may read it "
            f"({one_line(error)})"
        ) from error
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise _no_repository(model, error) from error
    except LocalEntryNotFoundError as error:  # its own text is advice; the cause says what happened
        problem = one_line(error.__cause__ or error)
        path = Path(model)
        is_path_typo = path.parent.is_dir() and path.parent != Path() and not path.exists()
        hint = f"; there is no directory {path.resolve()} either" if is_path_typo else ""
        raise ModelError(
            f"{model} is not in the Hugging Face cache and was not fetched: {problem}{hint}"
        ) from error
    except Exception as error:  # of what carries HTTP, too: a proxy's, an address that is none
        raise ModelError(f"{model} was not fetched: {one_line(error)}") from error


def _counting(progress: Progress) -> type[tqdm]:
    """The bars that a download shows in a terminal. One of them counts the bytes that it stores."""

    class Bar(tqdm):
        def __init__(self, *args: Any, name: str | None = None, **options: Any) -> None:
            self._counts = name == _STORED_BYTES
            super().__init__(*args, name=name, **options)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.disable:  # then it does not count
                self.n += n or 0
            if self._counts:
                progress(int(self.n), int(self.total or 0))
            return shown

    return Bar


def _no_repository(model: str, error: Exception) -> ModelError:
    problem = (
        "a name with a colon is one of Ollama's, and models come from Hugging Face, such as "
        "mlx-community/Qwen3-4B-4bit"
        if ":" in model
        else one_line(error)
    )
    return ModelError(f"{model} is neither a directory nor a repository: {problem}")


def fingerprint(checkpoint: Path) -> str:
    """Sixteen hexadecimal digits that change with the config or the weights.

    Digests config.json, and of each weight file its name, size, header, `_version` and samples of
    every tensor. Reading a whole checkpoint would take minutes. The samples find most edits that
    keep the version: of a file in the Hugging Face cache that was edited in place, or of one whose
    time of modification was set back. Raises ModelError for a file that is not whole.
    """
    digest = blake3((checkpoint / "config.json").read_bytes())
    for file in sorted(checkpoint.glob(WEIGHTS)):
        header = read_header(file)
        digest.update(f"{file.name}:{file.stat().st_size}:{_version(file)}:".encode())
        digest.update(header.text)
        with file.open("rb") as weights:
            for span in sorted(header.spans.values()):
                for sample in _samples(span):
                    weights.seek(sample.start)
                    digest.update(weights.read(sample.stop - sample.start))
    return digest.hexdigest(length=8)


def _version(file: Path) -> str:
    """The SHA-256 by which the Hugging Face cache names the file that a snapshot links to; of any
    other file the time of modification, in nanoseconds. A copy without its time of modification
    counts as another model, which costs the disk cache and is never wrong.
    """
    blob = file.resolve()
    if blob.parent.name == _BLOBS and _SHA256.fullmatch(blob.name):
        return blob.name
    return str(blob.stat().st_mtime_ns)


def _samples(tensor: ByteSpan) -> list[ByteSpan]:
    """Both ends and places evenly between; all of a tensor that is no longer than the samples.

    Several, since of a tensor that joins others, as Q, K and V or experts, a part may change alone.
    """
    free = tensor.stop - tensor.start - _SAMPLE_BYTES
    if free <= (_SAMPLES - 1) * _SAMPLE_BYTES:
        return [tensor]
    starts = (tensor.start + sample * free // (_SAMPLES - 1) for sample in range(_SAMPLES))
    return [ByteSpan(start, start + _SAMPLE_BYTES) for start in starts]


def _checked(directory: Path) -> Path:
    try:
        check_files(directory)
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {error.strerror}") from error
    return directory


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
