"""Where a checkpoint lies, and what identifies it."""

from pathlib import Path

from blake3 import blake3
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from engine.mlx_backend.errors import ModelError, one_line
from engine.mlx_backend.loading.checkpoint_files import WEIGHTS, check_files

DEFAULT_NAME = "rootstock-demo"
DEFAULT_CHECKPOINT = Path(__file__).parents[2] / "demo_model"
"""The embedded default: the demonstration model that `tools/train_demo_model.py` trained."""

_FILES = ["*.json", WEIGHTS, "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja"]
_SAMPLES = 16
_SAMPLE_BYTES = 4096


def find_checkpoint(model: str, *, download: bool) -> Path:
    """The directory of a checkpoint given as a directory or as a Hugging Face repository.

    Without `download` a repository must have been fetched before. Code in repositories is neither
    fetched nor run. Raises ModelError, also when a file is missing or not whole.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _checked(path)
    if path.exists():
        raise ModelError(f"{model} is a file; a model is a directory or a repository")
    try:
        return _checked(
            Path(snapshot_download(model, allow_patterns=_FILES, local_files_only=not download))
        )
    except GatedRepoError as error:
        raise ModelError(
            f"{model} is gated: HF_TOKEN or `hf auth login` must name an account that may read it "
            f"({one_line(error)})"
        ) from error
    except (HFValidationError, RepositoryNotFoundError) as error:
        problem = one_line(error)
        raise ModelError(f"{model} is neither a directory nor a repository: {problem}") from error
    except (LocalEntryNotFoundError, OSError) as error:
        problem = one_line(error)
        raise ModelError(f"{model} is not here and was not fetched: {problem}") from error


def fingerprint(checkpoint: Path) -> str:
    """Sixteen hexadecimal digits that change with the config or the weights.

    Digests config.json, and of each weight file its name, size and samples spread over it, so that
    two fine-tunes of one model differ; reading whole checkpoints would take minutes.
    """
    digest = blake3((checkpoint / "config.json").read_bytes())
    for file in sorted(checkpoint.glob(WEIGHTS)):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as weights:
            for sample in range(_SAMPLES):
                weights.seek(sample * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
                digest.update(weights.read(_SAMPLE_BYTES))
    return digest.hexdigest(length=8)


def _checked(directory: Path) -> Path:
    try:
        check_files(directory)
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {error.strerror}") from error
    return directory
