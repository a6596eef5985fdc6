"""Where a checkpoint lies, and what identifies it."""

import re
from pathlib import Path
from typing import Any

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
from engine.mlx_backend.loading.checkpoint_files import WEIGHTS, ByteSpan, check_files, read_header
from engine.values.settings import DEFAULT_NAME

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
