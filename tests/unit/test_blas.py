"""Which BLAS is loaded, with whose threads, and what is said about it."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from engine.mlx_backend.blas import (
    FASTER,
    GET_MKL,
    GET_OPENBLAS,
    SET_TBB,
    Blas,
    install_command,
    load_first,
)

ROOT = Path(__file__).parents[2]
OPENBLAS = "libopenblas.so.0"
INSTALL = "python -m pip install"
INTEL_LAYER, SEQUENTIAL_LAYER, TBB_LAYER = 0, 1, 4


class Library:
    """The functions of MKL and OpenBLAS that choose threads, or tell of them."""

    def __init__(self, layer: int | None, parallel: int) -> None:
        self.layer = layer
        self.interface: int | None = None
        self._parallel = parallel

    def MKL_Set_Interface_Layer(self, interface: int) -> int:  # noqa: N802
        self.interface = interface
        return interface

    def MKL_Set_Threading_Layer(self, layer: int) -> int:  # noqa: N802
        self.layer = layer if self.layer is None else self.layer
        return self.layer

    def openblas_get_parallel(self) -> int:
        return self._parallel


class Machine:
    """One that has these files, by their names in `tmp_path`, and perhaps OpenBLAS."""

    def __init__(
        self,
        directory: Path,
        names: Sequence[str] = (),
        openblas: bool = True,
        layer: int | None = None,
        parallel: int = 1,
    ) -> None:
        self.directory = directory
        self.library = Library(layer, parallel)
        self.opened: list[str] = []
        self._openblas = openblas
        for name in names:
            (directory / name).touch()

    def load(self, environment: Mapping[str, str] | None = None, processor: str = "x86_64") -> Blas:
        nowhere = self.directory / "nowhere"
        directories = (nowhere, self.directory)
        return load_first(directories, environment or {}, processor, INSTALL, self._open)

    def _open(self, name: str) -> Library:
        if not (self._openblas if name == OPENBLAS else Path(name).exists()):
            raise OSError(name)
        self.opened.append(Path(name).name)
        return self.library


def mkl(version: int = 3) -> list[str]:
    parts = ("rt", "core", "intel_lp64", "intel_thread", "tbb_thread")
    return ["libtbb.so.12", *(f"libmkl_{part}.so.{version}" for part in parts)]


def test_the_latest_mkl_with_tbb_is_preferred(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [*mkl(2), *mkl(3)])
    found = machine.load()
    assert found == Blas("MKL", str(tmp_path / "libmkl_rt.so.3"), "TBB threads")
    assert str(found) == f"MKL {tmp_path}/libmkl_rt.so.3, TBB threads"
    assert found.brief == "MKL libmkl_rt.so.3, TBB threads"
    # MKL finds TBB only where it has been loaded, and calls through MLX pass 32-bit integers.
    assert machine.opened == ["libtbb.so.12", "libmkl_rt.so.3"]
    assert (machine.library.layer, machine.library.interface) == (TBB_LAYER, 0)


@pytest.mark.parametrize("missing", ["libtbb.so.12", "libmkl_tbb_thread.so.3", "libmkl_rt.so.3"])
def test_mkl_without_tbb_is_left_alone(tmp_path: Path, missing: str) -> None:
    machine = Machine(tmp_path, [name for name in mkl() if name != missing])
    assert machine.load() == Blas(
        "OpenBLAS", OPENBLAS, "pthreads", FASTER + GET_MKL.format(INSTALL)
    )
    assert "libmkl_rt.so.3" not in machine.opened


@pytest.mark.parametrize("layer", ["INTEL", "GNU", "TBB", ""])
def test_no_variable_brings_openmp(tmp_path: Path, layer: str) -> None:
    machine = Machine(tmp_path, mkl())
    assert machine.load({"MKL_THREADING_LAYER": layer}).threads == "TBB threads"
    assert machine.library.layer == TBB_LAYER


def test_one_thread_may_be_asked_for(tmp_path: Path) -> None:
    machine = Machine(tmp_path, mkl())
    found = machine.load({"MKL_THREADING_LAYER": "SEQUENTIAL"})
    assert (found.threads, found.advice) == ("one thread", "")
    assert machine.library.layer == SEQUENTIAL_LAYER


def test_openmp_that_was_there_before_is_said(tmp_path: Path) -> None:
    found = Machine(tmp_path, mkl(), layer=INTEL_LAYER).load()
    assert (found.threads, found.advice) == ("OpenMP threads", SET_TBB)


@pytest.mark.parametrize(
    ("parallel", "threads"), [(0, "one thread"), (1, "pthreads"), (2, "OpenMP threads")]
)
def test_openblas_says_whose_threads_it_uses(tmp_path: Path, parallel: int, threads: str) -> None:
    found = Machine(tmp_path, parallel=parallel).load()
    assert str(found) == f"OpenBLAS libopenblas.so.0, {threads}"


def test_what_to_install_is_said(tmp_path: Path) -> None:
    found = Machine(tmp_path, openblas=False).load()
    assert (found.name, found.library) == ("reference", "")
    assert GET_OPENBLAS in found.advice
    assert GET_MKL.format(INSTALL) in found.advice


@pytest.mark.parametrize(
    ("mark", "command"),
    [
        ("pipx_metadata.json", "pipx inject rootstock-serve"),
        ("uv-receipt.toml", "uv pip install --python {prefix}"),
        ("pyvenv.cfg", "'/my venv/bin/python' -m pip install"),
    ],
)
def test_the_command_reaches_the_environment(tmp_path: Path, mark: str, command: str) -> None:
    (prefix := tmp_path / "rootstock-serve").mkdir()
    (prefix / mark).touch()
    assert install_command(prefix, "/my venv/bin/python") == command.format(prefix=prefix)


def test_mkl_is_not_advised_where_there_is_none(tmp_path: Path) -> None:
    assert Machine(tmp_path).load(processor="aarch64").advice == ""
    advice = Machine(tmp_path, openblas=False).load(processor="aarch64").advice
    assert GET_OPENBLAS in advice
    assert "mkl" not in advice


PRODUCT = """
import os, platform, sys
from pathlib import Path
from engine.mlx_backend import blas
found = {load}
import mlx.core as mx
ones = mx.ones((512, 512))
assert (ones @ ones == 512).all().item()
print(found)
print(Path("/proc/self/maps").read_text())
"""


def libraries(load: str, **environment: str) -> str:
    """What is mapped after a product, in a process of its own, after a line with the BLAS."""
    command = [sys.executable, "-c", PRODUCT.format(load=load)]
    environment = {**os.environ, **environment}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture(scope="module")
def mkl_directory() -> Path:
    if sys.platform != "linux":
        pytest.skip("MLX takes another BLAS on Linux alone")
    name, library, *_ = libraries("blas.load_blas()").split(maxsplit=2)
    if name != "MKL":
        pytest.skip(f"MKL is not here, but {name}")
    return Path(library.rstrip(",")).parent


def test_mlx_computes_on_tbb_threads(mkl_directory: Path) -> None:
    said, _, maps = libraries(
        "blas.load_blas()", MKL_THREADING_LAYER="INTEL", MKL_INTERFACE_LAYER="ILP64"
    ).partition("\n")
    assert said.startswith(f"MKL {mkl_directory}")
    assert "libmkl_tbb_thread" in maps
    assert "libiomp5" not in maps


def test_the_process_outlives_an_mkl_without_tbb(mkl_directory: Path, tmp_path: Path) -> None:
    for file in mkl_directory.glob("libmkl_*"):
        (tmp_path / file.name).symlink_to(file)
    arguments = f"[Path({str(tmp_path)!r})], {{}}, 'x86_64', {INSTALL!r}, blas._open_global"
    loaded = f"blas.load_first({arguments})"
    said, _, maps = libraries(loaded).partition("\n")
    assert said.startswith(("OpenBLAS", "reference"))
    assert "libmkl" not in maps
