"""Where a checkpoint lies, and what identifies it."""

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

from engine.api import ModelError
from engine.fetching import Progress
from engine.mlx_backend.errors import one_line
from engine.mlx_backend.loading.checkpoint_files import WEIGHTS, ByteSpan, check_files, read_header
from engine.types.settings import DEFAULT_NAME

DEFAULT_CHECKPOINT = Path(__file__).parents[2] / "demo_model"
"""The embedded default: the demonstration model that `tools/train_demo_model.py` trained."""

_PATH_STARTS = ("/", ".", "~")  # of no repository's name
_FILES = ["*.json", WEIGHTS, "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja"]
_SAMPLES = 4  # of a tensor
_SAMPLE_BYTES = 4096
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
        return Path(snapshot_download(model, allow_patterns=_FILES, local_files_only=True))
    except HFValidationError as error:
        raise _no_repository(model, error) from error
    except OSError as error:
        fetch = f"`rootstock pull {model}` fetches it"
        raise ModelError(f"{model} is not in the Hugging Face cache; {fetch}") from error


def _fetched(model: str, progress: Progress) -> Path:
    """Raises ModelError when the repository is not in the cache, and cannot be fetched either."""
    try:
        bar = _counting(progress)
        return Path(snapshot_download(model, allow_patterns=_FILES, tqdm_class=bar))
    except GatedRepoError as error:
        raise ModelError(
            f"{model} is gated: HF_TOKEN or `hf auth login` must name an account that may read it "
            f"({one_line(error)})"
        ) from error
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise _no_repository(model, error) from error
    except LocalEntryNotFoundError as error:  # its own text is advice; the cause says what happened
        problem = one_line(error.__cause__ or error)
        raise ModelError(f"{model} is not here and was not fetched: {problem}") from error
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
    return ModelError(f"{model} is neither a directory nor a repository: {one_line(error)}")


def fingerprint(checkpoint: Path) -> str:
    """Sixteen hexadecimal digits that change with the config or the weights.

    Digests config.json, and of each weight file its name, size and header, and samples of every
    tensor: a fine-tune differs from its model, be it in few tensors, or in each in a few values of
    a hundred. What changes between the samples alone, as some rows of an embedding or some experts
    of a joined tensor, is not seen: reading whole checkpoints would take minutes. Raises ModelError
    for a file that is not whole.
    """
    digest = blake3((checkpoint / "config.json").read_bytes())
    for file in sorted(checkpoint.glob(WEIGHTS)):
        header = read_header(file)
        digest.update(f"{file.name}:{file.stat().st_size}:".encode())
        digest.update(header.text)
        with file.open("rb") as weights:
            for span in sorted(header.spans.values()):
                for sample in _samples(span):
                    weights.seek(sample.start)
                    digest.update(weights.read(sample.stop - sample.start))
    return digest.hexdigest(length=8)


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
