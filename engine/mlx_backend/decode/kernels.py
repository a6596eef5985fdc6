"""A process that builds the kernels of a model's compiled decodes on a CPU.

    python -m engine.mlx_backend.decode.kernels SOCKET CONFIG BATCHING ATTENTION

MLX has g++ build a shared library for each fused operation, and keeps it in a folder that all
processes share. So a child process that traces and computes the same steps spares the engine the
wait. It reads small weights only and replaces large ones by zeros that take no memory, because no
fused operation reads them. A file in the same folder records that a model's kernels are built.
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
from engine.mlx_backend.loading.locate import find_checkpoint
from engine.process.child import start_child
from engine.values.settings import EngineConfig

_PROBE = b"#include <cmath>\nint main() { return std::isnan(0.0); }\n"


def compiler_problem() -> str:
    """Why MLX cannot compile on this machine's CPU, in a few words; "" if it can."""
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
    """The file that exists once the kernels of this model, settings and code have been built. It is
    next to the kernels, so that it is removed with them.
    """
    digest = hashlib.blake2b(digest_size=12)
    digest.update((checkpoint / "config.json").read_bytes())
    settings = config.block_size, config.attention, len(config.adapters), config.kv_format
    digest.update(" ".join(map(str, settings)).encode())
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(source.read_bytes())
    return _folder() / f"rootstock-{metadata.version('mlx-lm')}-{digest.hexdigest()}"


def _folder() -> Path:
    """The folder in which MLX keeps kernels of CPUs. Raises OSError without a temporary folder."""
    return Path(tempfile.gettempdir()) / "mlx" / metadata.version("mlx") / "cpu"


def start_building(
    config: EngineConfig, batching: str, attention: str
) -> "subprocess.Popen[bytes]":
    """Start a child process that builds the kernels for the batching and the attention of these
    names; for `config` see `build_kernels`. Raises OSError if it cannot be started.
    """
    settings = CONFIG.dump_json(config).decode()
    connection, process = start_child(
        "engine.mlx_backend.decode.kernels", settings, batching, attention
    )
    connection.close()
    return process


def main(descriptor: int, settings: str, batching: str, attention: str) -> None:
    """Build the kernels, unless another process has. Raises whatever the model raises."""
    os.close(descriptor)
    os.nice(10)  # the engine is serving requests
    config = CONFIG.validate_json(settings)
    done = marker(config, find_checkpoint(config.model, download=False))
    done.parent.mkdir(parents=True, exist_ok=True)
    with (done.parent / "rootstock.lock").open("w") as lock:
        flock(lock, LOCK_EX)  # or MLX loads a library that another process is writing
        if done.exists():
            return
        with mlx_imports():
            from engine.mlx_backend import assembly  # noqa: PLC0415 - MLX comes after the BLAS

        assembly.build_kernels(config, batching, attention)
        done.touch()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
