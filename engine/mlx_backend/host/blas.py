"""A fast BLAS for MLX on Linux CPUs.

The wheels on PyPI link the reference BLAS, 20 to 50 times slower than OpenBLAS or MKL in float32.
A library loaded with RTLD_GLOBAL before `mlx.core` is imported answers its `cblas_*` calls instead.
This module imports no MLX and must run before anything that does.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ADVICE = (
    "matrix products will be 20 to 50 times slower than they could be: install Debian's or "
    "Ubuntu's libopenblas0-pthread, or run pip install mkl"
)
_GPU_PACKAGES = ("mlx-cuda", "mlx-cuda-12", "mlx-cuda-13")


@dataclass(frozen=True, slots=True)
class Blas:
    """The BLAS that MLX will use. `name` is empty where the question does not arise."""

    name: str = ""
    library: str = ""
    advice: str = ""  # what the user should install, when no fast BLAS was found


def load_blas() -> Blas:
    """Load the best BLAS at hand, once per process and before `mlx.core` is imported.

    Does nothing off Linux, or when MLX's CUDA package is installed.
    """
    if sys.platform != "linux" or _has_gpu_package():
        return Blas()
    return first_loadable(candidates(Path(sys.prefix)), _load_global)


def candidates(prefix: Path) -> list[tuple[str, str]]:
    """Names and files to try, best first. PyPI's `mkl` puts its library below `sys.prefix`."""
    mkl_files = ("libmkl_rt.so.2", "libmkl_rt.so.3", "libmkl_rt.so")
    return [
        ("OpenBLAS", "libopenblas.so.0"),
        *(("MKL", file) for file in mkl_files),
        *(("MKL", str(prefix / "lib" / file)) for file in mkl_files),
    ]


def first_loadable(libraries: Sequence[tuple[str, str]], load: Callable[[str], None]) -> Blas:
    """Try the libraries in order; `load` raises OSError where one is missing."""
    for name, library in libraries:
        try:
            load(library)
        except OSError:
            continue
        return Blas(name, library)
    return Blas("reference", advice=ADVICE)


def _load_global(library: str) -> None:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)


def _has_gpu_package() -> bool:
    installed = {name.lower() for dist in metadata.distributions() if (name := dist.name)}
    return not installed.isdisjoint(_GPU_PACKAGES)
