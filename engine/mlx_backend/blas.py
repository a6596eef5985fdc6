"""Loads a fast BLAS for MLX on Linux CPUs. On other systems and on GPUs it does nothing.

MLX's wheels on PyPI link the reference BLAS, which is 20 to 50 times slower in float32 than
OpenBLAS or MKL. A library that is loaded with RTLD_GLOBAL before `mlx.core` is imported takes the
place of its `cblas_*` functions. So this module imports no MLX, and runs before MLX is imported.

The library's threads matter as much as the library. The engine's matrix products are small and are
computed from the engine's own thread: there MKL with TBB threads is the fastest, and MKL with
OpenMP threads, its default, is slower than OpenBLAS.
"""

import ctypes
import os
import platform
import shlex
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

SLOW = "matrix products will be 20 to 50 times slower than they could be: "
GET_OPENBLAS = "install Debian's or Ubuntu's libopenblas0-pthread"
GET_MKL = "run {} mkl, which takes about 1 GB"
FASTER = "decoding is faster with MKL: "
SET_TBB = "something loaded MKL with slower threads before: set MKL_THREADING_LAYER=TBB"

_GPU_PACKAGES = ("mlx-cuda", "mlx-cuda-12", "mlx-cuda-13")

# mkl_service.h: MKL_INTERFACE_LP64; MKL_THREADING_ INTEL, SEQUENTIAL, PGI, GNU, TBB.
_LP64, _SEQUENTIAL, _TBB = 0, 1, 4
_MKL_THREADS = ("OpenMP threads", "one thread", "OpenMP threads", "OpenMP threads", "TBB threads")

# OpenBLAS's cblas.h: OPENBLAS_ SEQUENTIAL, THREAD, OPENMP.
_OPENBLAS_THREADS = ("one thread", "pthreads", "OpenMP threads")

OpenLibrary: TypeAlias = Callable[[str], Any]
"""Loads a shared library globally. Returns its functions as attributes. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Blas:
    """The BLAS that MLX will use. `name` is empty off Linux and with MLX's CUDA package."""

    name: str = ""
    library: str = ""
    threads: str = ""  # the kind of threads that compute a matrix product
    advice: str = ""  # what the user can do for a faster one; "" if nothing

    def __str__(self) -> str:
        return f"{self.name} {self.library}, {self.threads}" if self.library else self.name

    @property
    def brief(self) -> str:
        """The description without the library's directory, which differs between machines."""
        return str(replace(self, library=Path(self.library).name)) if self.library else self.name


def load_blas(directories: Iterable[Path] | None = None) -> Blas:
    """Load the fastest BLAS that is installed. Call it before `mlx.core` is imported.

    MKL is searched in `directories`, by default those where this interpreter's packages install
    libraries. Does nothing off Linux, or if MLX's CUDA package is installed.
    """
    if sys.platform != "linux" or has_cuda_package():
        return Blas()
    found = _library_directories() if directories is None else directories
    install = install_command(Path(sys.prefix), sys.executable)
    return load_first(found, os.environ, platform.machine(), install, _open_global)


def install_command(prefix: Path, python: str) -> str:
    """The command, without the package's name, that installs into the environment at `prefix`. A
    plain `pip install` does not reach the environments of pipx and `uv tool`.
    """
    if (prefix / "pipx_metadata.json").exists():
        return f"pipx inject {shlex.quote(prefix.name)}"
    if (prefix / "uv-receipt.toml").exists():
        return f"uv pip install --python {shlex.quote(str(prefix))}"
    return f"{shlex.quote(python)} -m pip install"


def load_first(
    directories: Iterable[Path],
    environment: Mapping[str, str],
    machine: str,
    install: str,
    open_library: OpenLibrary,
) -> Blas:
    """Load MKL if all that it needs is in one of the directories, otherwise OpenBLAS if the dynamic
    loader finds it. Otherwise MLX keeps the reference BLAS.

    `install` is a command that installs the package whose name is appended. Of the values of
    MKL_THREADING_LAYER only SEQUENTIAL is respected: all others are slower than TBB.
    """
    sequential = environment.get("MKL_THREADING_LAYER") == "SEQUENTIAL"
    layer = _SEQUENTIAL if sequential else _TBB
    has_mkl = machine == "x86_64"  # PyPI has MKL only for this processor
    get_mkl = GET_MKL.format(install)
    for directory in directories:
        for library in sorted(directory.glob("libmkl_rt.so.*"), reverse=True):
            with suppress(OSError):
                return _load_mkl(library, layer, open_library)
    with suppress(OSError):
        return _load_openblas(FASTER + get_mkl if has_mkl else "", open_library)
    to_get = f"{GET_OPENBLAS}, or {get_mkl}" if has_mkl else GET_OPENBLAS
    return Blas("reference", advice=SLOW + to_get)


def _load_mkl(library: Path, layer: int, open_library: OpenLibrary) -> Blas:
    """Raises OSError if a part of MKL is missing. MKL itself would exit at its first product."""
    threading = library.with_name(library.name.replace("_rt", "_tbb_thread"))
    threading.stat()
    open_library(str(library.with_name("libtbb.so.12")))  # MKL does not search its directory
    mkl = open_library(str(library))
    # These calls take precedence over MKL's environment variables. MLX's integers have 32 bits.
    mkl.MKL_Set_Interface_Layer(_LP64)
    used = mkl.MKL_Set_Threading_Layer(layer)  # another one if MKL was called before
    advice = "" if used == layer else SET_TBB
    return Blas("MKL", str(library), _MKL_THREADS[used], advice)


def _load_openblas(advice: str, open_library: OpenLibrary) -> Blas:
    """Raises OSError if the dynamic loader does not find OpenBLAS."""
    library = "libopenblas.so.0"
    threads = _OPENBLAS_THREADS[open_library(library).openblas_get_parallel()]
    return Blas("OpenBLAS", library, threads, advice)


def _open_global(library: str) -> Any:
    return ctypes.CDLL(library, ctypes.RTLD_GLOBAL)


def _library_directories() -> list[Path]:
    """Where pip, its `--user` installs, and conda put the shared libraries of packages."""
    prefixes = [sysconfig.get_path("data")]
    if site.ENABLE_USER_SITE:
        prefixes.append(sysconfig.get_path("data", sysconfig.get_preferred_scheme("user")))
    return [Path(prefix) / "lib" for prefix in prefixes]


@cache
def has_cuda_package() -> bool:
    """Whether MLX's CUDA backend is installed."""
    installed = {name.lower() for dist in metadata.distributions() if (name := dist.name)}
    return not installed.isdisjoint(_GPU_PACKAGES)
