"""A fast BLAS for MLX on Linux CPUs. Off Linux, and on GPUs, nothing here is used.

The wheels on PyPI link the reference BLAS, 20 to 50 times slower than OpenBLAS or MKL in float32.
A library loaded with RTLD_GLOBAL before `mlx.core` is imported answers its `cblas_*` calls instead.
This module imports no MLX and must run before anything that does.

Whose threads share a product weighs as much as the library. The engine's products are small and
come from a thread of its own: MKL with TBB is the fastest there, MKL with OpenMP, which is its
default, slower than OpenBLAS.
"""

import ctypes
import os
import platform
import shlex
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
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
"""Loads a shared library for the whole process; its functions. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Blas:
    """The BLAS that MLX will use. `name` is empty where the question does not arise."""

    name: str = ""
    library: str = ""
    threads: str = ""  # that share a product
    advice: str = ""  # what would make it faster

    def __str__(self) -> str:
        return f"{self.name} {self.library}, {self.threads}" if self.library else self.name

    @property
    def brief(self) -> str:
        """Without the folder, which says something of this machine alone."""
        return str(replace(self, library=Path(self.library).name)) if self.library else self.name


def load_blas(directories: Iterable[Path] | None = None) -> Blas:
    """Load the best BLAS at hand, before `mlx.core` is imported.

    MKL is looked for in `directories`: by default where this interpreter's packages have their
    libraries. Does nothing off Linux, or when MLX's CUDA package is installed.
    """
    if sys.platform != "linux" or has_cuda_package():
        return Blas()
    found = _library_directories() if directories is None else directories
    install = install_command(Path(sys.prefix), sys.executable)
    return load_first(found, os.environ, platform.machine(), install, _open_global)


def install_command(prefix: Path, python: str) -> str:
    """What puts a package into the environment at the prefix: a plain `pip install` would not
    reach one that pipx or `uv tool` has made.
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
    """MKL, where all that it needs is in one of the directories; else OpenBLAS, else the reference.

    `install`, followed by a package's name, is the command that installs it here.
    `MKL_THREADING_LAYER=SEQUENTIAL` is heeded. All its other values are slower than TBB.
    """
    sequential = environment.get("MKL_THREADING_LAYER") == "SEQUENTIAL"
    layer = _SEQUENTIAL if sequential else _TBB
    has_mkl = machine == "x86_64"  # PyPI has it for no other
    get_mkl = GET_MKL.format(install)
    attempts = [partial(_load_mkl, library, layer) for library in _mkl_libraries(directories)]
    attempts.append(partial(_load_openblas, FASTER + get_mkl if has_mkl else ""))
    for attempt in attempts:
        with suppress(OSError):
            return attempt(open_library)
    to_get = f"{GET_OPENBLAS}, or {get_mkl}" if has_mkl else GET_OPENBLAS
    return Blas("reference", advice=SLOW + to_get)


def _mkl_libraries(directories: Iterable[Path]) -> Iterator[Path]:
    for directory in directories:
        yield from sorted(directory.glob("libmkl_rt.so.*"), reverse=True)


def _load_mkl(library: Path, layer: int, open_library: OpenLibrary) -> Blas:
    """Raises OSError where a part is missing: at the first product MKL itself would exit for it."""
    threading = library.with_name(library.name.replace("_rt", "_tbb_thread"))
    threading.stat()
    open_library(str(library.with_name("libtbb.so.12")))  # MKL does not look beside itself for it
    mkl = open_library(str(library))
    # These weigh more than MKL's variables. MLX's integers have 32 bits.
    mkl.MKL_Set_Interface_Layer(_LP64)
    used = mkl.MKL_Set_Threading_Layer(layer)  # another, if there was a call before
    advice = "" if used == layer else SET_TBB
    return Blas("MKL", str(library), _MKL_THREADS[used], advice)


def _load_openblas(advice: str, open_library: OpenLibrary) -> Blas:
    """Raises OSError where the dynamic loader does not find it."""
    library = "libopenblas.so.0"
    threads = _OPENBLAS_THREADS[open_library(library).openblas_get_parallel()]
    return Blas("OpenBLAS", library, threads, advice)


def _open_global(library: str) -> Any:
    return ctypes.CDLL(library, ctypes.RTLD_GLOBAL)


def _library_directories() -> list[Path]:
    """Where pip, for everybody or for this user, and conda put the libraries of packages."""
    prefixes = [sysconfig.get_path("data")]
    if site.ENABLE_USER_SITE:
        prefixes.append(sysconfig.get_path("data", sysconfig.get_preferred_scheme("user")))
    return [Path(prefix) / "lib" for prefix in prefixes]


@cache
def has_cuda_package() -> bool:
    """Whether MLX's CUDA backend is installed."""
    installed = {name.lower() for dist in metadata.distributions() if (name := dist.name)}
    return not installed.isdisjoint(_GPU_PACKAGES)
