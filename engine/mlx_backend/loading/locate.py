"""Finds the checkpoint of a name: a directory, or a repository, which may be fetched.

Imports no MLX, because the server uses this module, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub import constants, errors, snapshot_download
from huggingface_hub.utils.tqdm import tqdm

from engine.api import ModelError, Progress, one_line
from engine.mlx_backend.loading.checkpoint import (
    DEFAULT_CHECKPOINT,
    FILES,
    Checkpoint,
    checked,
    checkpoints_in,
    listed,
)
from engine.mlx_backend.loading.minilm import MINILM
from engine.mlx_backend.loading.packages import PackagedModel
from engine.mlx_backend.loading.smollm2 import SMOLLM2
from engine.values.settings import DEMO_NAME

PACKAGED: dict[str, PackagedModel] = {model.name: model for model in (SMOLLM2, MINILM)}
"""The models that come as packages, by name."""

_PATH_STARTS = ("/", ".", "~")  # no repository's name begins with one
_STORED_BYTES = "huggingface_hub.snapshot_download"  # the progress bar that counts stored bytes


def find_checkpoint(model: str, *, download: bool) -> Path:
    """The directory of a checkpoint. `model` is a directory or a Hugging Face repository; if it is
    empty, or the embedded model's name, it is the embedded model; `smollm2` and `minilm` come as
    packages.

    A `model` that begins with `/`, `.` or `~` is a directory. Without `download` a repository or
    a package must have been fetched before. Code in repositories is neither fetched nor run.
    Raises ModelError, whose message leaves the model's name to the caller, also when a file is
    missing or not whole.
    """
    if (found := local_checkpoint(model)) is not None:
        return found
    if download:
        return fetch_checkpoint(model, lambda done_bytes, total_bytes: None)
    if model in PACKAGED:
        raise ModelError(f"it has not been fetched; `rootstock pull {model}` fetches it")
    try:
        return checked(Path(snapshot_download(model, allow_patterns=FILES, local_files_only=True)))
    except errors.HFValidationError as error:
        raise _no_repository(model, one_line(error)) from error
    except OSError as error:
        raise ModelError(
            f"the Hugging Face cache does not have it; `rootstock pull {model}` fetches it"
            f"{_alternatives(model)}"
        ) from error


def local_checkpoint(model: str) -> Path | None:
    """The checkpoint in the directory `model`, the embedded model, or a fetched package; None for a
    repository, and for `smollm2` and `minilm` before they have been fetched.

    Raises ModelError for a file, for a path that does not exist, and when a file is missing or not
    whole.
    """
    if model in {"", DEMO_NAME}:
        return DEFAULT_CHECKPOINT
    if model in PACKAGED:
        return PACKAGED[model].converted()
    try:
        path = Path(model).expanduser()
        is_directory, is_there = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # RuntimeError: `~nobody`
        raise ModelError(f"it cannot be looked for: {one_line(error)}") from error
    if is_directory:
        return checked(path)
    if is_there:
        raise ModelError(f"{path.resolve()} is a file; a model is a directory or a repository")
    if model.startswith(_PATH_STARTS):
        raise ModelError(f"there is no directory {path.resolve()}{_alternatives(model)}")
    return None


def fetch_checkpoint(repository: str, progress: Progress) -> Path:
    """The directory of a checkpoint, fetched from Hugging Face if it is not in the cache yet;
    `smollm2` and `minilm` are fetched as packages.

    `progress` is called on other threads. Raises ModelError when the repository cannot be fetched,
    and when a file is missing or not whole.
    """
    if repository in PACKAGED:
        return PACKAGED[repository].fetch(progress)

    class Bar(tqdm):
        """A progress bar in a terminal. The one that counts stored bytes calls `progress`."""

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

    try:
        found = snapshot_download(repository, allow_patterns=FILES, tqdm_class=Bar)
    except errors.GatedRepoError as error:
        raise ModelError(
            "it is gated: HF_TOKEN or `hf auth login` must name an account that may read it "
            f"({one_line(error)})"
        ) from error
    except errors.HFValidationError as error:
        raise _no_repository(repository, one_line(error)) from error
    except errors.RepositoryNotFoundError as error:
        problem = f"{_hub()} has none of that name, or none that your HF_TOKEN may read"
        raise _no_repository(repository, problem) from error
    except errors.LocalEntryNotFoundError as error:
        problem = one_line(error.__cause__ or error)  # its own message is only advice
        if constants.HF_HUB_OFFLINE:
            problem = "HF_HUB_OFFLINE is set"
        raise ModelError(
            f"there is no directory {Path(repository).resolve()}, the Hugging Face cache does not "
            f"have it, and {_hub()} cannot be reached ({problem}){_alternatives(repository)}"
        ) from error
    except Exception as error:  # other errors of HTTP, such as a proxy's or an invalid address
        raise ModelError(f"{_hub()} does not answer as it should: {one_line(error)}") from error
    return checked(Path(found))


@contextmanager
def about_draft_model(model: str) -> Iterator[None]:
    """Within the context the message of a ModelError names the draft model `model`. Else it would
    seem to be about the model that it drafts for.
    """
    try:
        yield
    except ModelError as error:
        problem = f"draft_model {model or DEMO_NAME} cannot be used: {one_line(error)}"
        raise ModelError(problem) from error


def _no_repository(model: str, problem: str) -> ModelError:
    """The error for a model whose name is not a repository's."""
    if ":" in model:
        problem = (
            "a name with a colon is one of Ollama's, and models come from Hugging Face: "
            "`rootstock pull mlx-community/Qwen3-4B-4bit`"
        )
    return ModelError(
        f"it is neither a directory nor a repository: {problem}{_alternatives(model)}"
    )


def _hub() -> str:
    """The name of the hub, or of the mirror that HF_ENDPOINT sets."""
    return constants.ENDPOINT.partition("://")[2]


def _alternatives(model: str) -> str:
    """What else a mistyped name may mean, for the end of a message: checkpoints next to the path,
    and repositories in the Hugging Face cache.
    """
    here = [str(Path(model).parent / name) for name in checkpoints_in(Path(model).parent)]
    found = Path(constants.HF_HUB_CACHE).glob("models--*/snapshots/*/config.json")
    cached = {file.parents[2].name.removeprefix("models--").replace("--", "/") for file in found}
    known = {name.rpartition("/")[2]: name for name in (*sorted(cached), *here)}
    if close := get_close_matches(Path(model).name, known, n=1):
        return f"; did you mean {known[close[0]]}?"
    return f"; at hand: {listed([*here, *sorted(cached)])}" if known else ""


def open_checkpoint(model: str) -> Checkpoint:
    """The checkpoint that `find_checkpoint` finds without a download. Raises ModelError."""
    return Checkpoint(find_checkpoint(model, download=False))
