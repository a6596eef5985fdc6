"""The kernels of a compiled decode on a CPU, built by a process of its own before they are needed.

    python -m engine.mlx_backend.decode.kernels SOCKET CONFIG BATCHING ATTENTION

MLX has g++ build a shared library for each fused operation, and keeps it in a folder that all its
processes share. So a child that traces and computes the same steps spares its parent the wait. It
reads small weights alone: what is large stands for zeros that take no memory, which no fused
operation sees. A file in the same folder records that a model's kernels are there.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from fcntl import LOCK_EX, flock
from importlib import metadata
from pathlib import Path

from engine.mlx_backend.backend import mlx_imports
from engine.mlx_backend.helper import CONFIG
from engine.mlx_backend.loading.checkpoint import find_checkpoint
from engine.process.child import start_child
from engine.values.settings import EngineConfig

_PROBE = b"#include <cmath>\nint main() { return std::isnan(0.0); }\n"


def compiler_problem() -> str:
    """Why MLX can compile nothing on this machine's CPU, in a few words; "" if it can."""
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=_folder()):
            pass
    except OSError as error:
        return f"the folder of MLX's kernels cannot be written: {error}"
    if shutil.which("g++") is None:
        return "there is no g++"
    command = ["g++", "-x", "c++", "-fsyntax-only", "-"]
    done = subprocess.run(command, input=_PROBE, capture_output=True, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines()
        return f"g++ fails: {lines[0] if lines else f'exit status {done.returncode}'}"
    return ""


def marker(config: EngineConfig, checkpoint: Path) -> Path:
    """The file that is there once the kernels of this model, settings and code have been built.

    Beside the kernels: who removes those removes it, too.
    """
    digest = hashlib.blake2b(digest_size=12)
    digest.update((checkpoint / "config.json").read_bytes())
    digest.update(f"{config.block_size} {config.attention} {len(config.adapters)}".encode())
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(source.read_bytes())
    return _folder() / f"rootstock-{metadata.version('mlx-lm')}-{digest.hexdigest()}"


def _folder() -> Path:
    """Where MLX keeps the kernels of CPUs. Raises OSError where there is no temporary folder."""
    return Path(tempfile.gettempdir()) / "mlx" / metadata.version("mlx") / "cpu"


def start_building(
    config: EngineConfig, batching: str, attention: str
) -> "subprocess.Popen[bytes]":
    """A child process that builds the kernels, for the execution with rows and attention of these
    names. Raises OSError where none can be started.
    """
    settings = CONFIG.dump_json(config).decode()
    connection, process = start_child(
        "engine.mlx_backend.decode.kernels", settings, batching, attention
    )
    connection.close()
    return process


def build(config: EngineConfig, batching: str, attention: str) -> None:
    """Compute a few compiled steps of the configured model, without its large weights, unless
    another process has done that before. Raises whatever the model raises.

    `memory_bytes` of the configuration: what was free when the model was loaded, on which depends
    the type of its weights.
    """
    os.nice(10)  # the engine is serving meanwhile
    done = marker(config, find_checkpoint(config.model, download=False))
    done.parent.mkdir(parents=True, exist_ok=True)
    with (done.parent / "rootstock.lock").open("w") as lock:
        flock(lock, LOCK_EX)  # one at a time: MLX loads a library that another is writing
        if done.exists():
            return
        with mlx_imports():
            from engine.mlx_backend import assembly  # noqa: PLC0415 - MLX comes after the BLAS

        assembly.build_kernels(config, batching, attention)
        done.touch()


def main(descriptor: int, settings: str, batching: str, attention: str) -> None:
    os.close(descriptor)
    build(CONFIG.validate_json(settings), batching, attention)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
