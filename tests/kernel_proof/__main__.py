"""Prove the kernel that reads blocks in place, without a device: `python -m tests.kernel_proof`."""

import ctypes.util
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, TypeVar

import mlx.core as mx
import typer

from tests.kernel_proof import arena, layers, mutations
from tests.kernel_proof.compilers import (
    check_cuda,
    check_metal,
    check_nvrtc,
    found,
    headers_of,
)
from tests.kernel_proof.mutations import MUTATIONS
from tests.kernel_proof.prove import prove
from tests.kernel_proof.reads import count_reads

T = TypeVar("T")

Line = tuple[str, str]
"""What was tried, and what is wrong; "" if nothing is."""

PARTS = ("tables", "arena", "faults", "reads", "devices")


@dataclass(frozen=True, slots=True)
class Proofs:
    """The parts of the proof. Each prints a title, and yields a line for whatever it tries."""

    cases: int
    seed: int
    compiler: str
    nvcc: str
    nvrtc: str
    clang: str
    counts: Counter[str] = field(default_factory=Counter)  # the random tables that were tried

    def tables(self) -> Iterator[Line]:
        """Random tables, and attention in float64."""
        print(f"Random tables of {len(layers.LAYERS)} kinds of layers, and attention in float64:")

        def one(index: int, folder: Path) -> Line:
            of, seed = layers.LAYERS[index], [self.seed, index]
            report = prove(of, folder, self.compiler, seed, self.cases)
            self.counts.update(report.counts)
            return f"{report.worst:.0e} {report.label}", report.problem

        yield from _side_by_side(one, range(len(layers.LAYERS)))
        yield ", ".join(f"{n} {what}" for what, n in self.counts.items()), ""

    def arena(self) -> Iterator[Line]:
        """Random rows of the project's own arena, and plain attention."""
        print("Random rows of the project's own arena, and plain attention to what it gathers:")

        def one(index: int, folder: Path) -> Line:
            of, seed = arena.LAYERS[index], [self.seed, index]
            report = arena.prove_arena(of, folder, self.compiler, seed, self.cases)
            return f"{report.worst:.0e} {report.label}", report.problem

        with arena.codes_by_token():
            yield from _side_by_side(one, range(len(arena.LAYERS)))

    def faults(self) -> Iterator[Line]:
        """Faults that are put into the text, and how each is noticed."""
        labels = list(MUTATIONS)
        print(f"{len(labels)} faults that are put into the text, and how each is noticed:")

        def one(index: int, folder: Path) -> Line:
            before, after = MUTATIONS[labels[index]]
            notice = mutations.notice(before, after, folder, self.compiler, [self.seed, index])
            return f"{labels[index]}: {notice}", "" if notice else "it is not noticed"

        yield from _side_by_side(one, range(len(labels)))

    def reads(self) -> Iterator[Line]:
        """The bytes of a prefix that rows share."""
        print("Bytes of K and V that thread groups read, of a prefix that rows share:")
        with TemporaryDirectory() as folder:
            for one in count_reads(Path(folder), self.compiler):
                yield (
                    f"{one.rows} rows: {one.alone:,} each by itself, {one.shared:,} shared, which "
                    f"is the prefix {one.tiles} times; {one.distinct:,} distinct",
                    "" if one.shared == one.expected else f"{one.expected:,} were expected",
                )

    def devices(self) -> Iterator[Line]:
        """What compilers of devices say of the text."""
        with TemporaryDirectory() as name:
            folder = Path(name)
            if found(self.nvcc):
                print(f"{self.nvcc} for CUDA:")
                yield from check_cuda(folder, self.nvcc)
            else:
                print(f"Not compiled for CUDA: there is no {self.nvcc}")
            if found(self.nvcc) and self.nvrtc:
                print(f"{self.nvrtc}, with which MLX compiles:")
                yield from check_nvrtc(self.nvrtc, headers_of(self.nvcc))
            else:
                print("Not compiled by NVRTC: it takes nvcc's headers, and its library in --nvrtc")
            if found(self.clang):
                print(f"{self.clang} for C++ for OpenCL, which stands for Metal:")
                yield from check_metal(folder, self.clang)
            else:
                print(f"Not compiled as if for Metal: there is no {self.clang}")


def main(
    parts: Annotated[list[str] | None, typer.Argument(help=f"Any of {', '.join(PARTS)}.")] = None,
    cases: Annotated[int, typer.Option(help="Random tables of each kind of layer.")] = 20,
    seed: Annotated[int, typer.Option(help="The seed of the tables.")] = 0,
    compiler: Annotated[str, typer.Option(help="Compiles the text for this processor.")] = "g++",
    nvcc: Annotated[str, typer.Option(help="Compiles it for CUDA, if it is there.")] = "nvcc",
    nvrtc: Annotated[str, typer.Option(help="The library with which MLX compiles.")] = (
        ctypes.util.find_library("nvrtc") or ""
    ),
    clang: Annotated[str, typer.Option(help="Compiles it for OpenCL, if it is there.")] = "clang",
) -> None:
    """Compile the kernel's text for this processor and compare what it computes; put faults into
    it, all of which must be noticed; count what it reads; compile it for devices.

    The exit status is 1 if anything is wrong.
    """
    mx.set_default_device(mx.cpu)
    proofs, started, problems = (
        Proofs(cases, seed, compiler, nvcc, nvrtc, clang),
        time.monotonic(),
        0,
    )
    for part in parts or PARTS:
        for label, problem in getattr(proofs, part)():
            problems += bool(problem)
            print(f"  WRONG {label}: {problem}" if problem else f"  ok    {label}", flush=True)
    print(f"{problems or 'no'} problems, {time.monotonic() - started:.0f} s")
    sys.exit(int(problems > 0))


def _side_by_side(make: Callable[[int, Path], T], indices: Sequence[int]) -> Iterator[T]:
    """What `make` returns for each index in turn, each in a folder of its own. The compilers and
    programs that it starts run side by side.
    """

    def made(index: int) -> T:
        with TemporaryDirectory() as folder:
            return make(index, Path(folder))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(made, indices)


if __name__ == "__main__":
    typer.run(main)
