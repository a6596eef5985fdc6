"""The program that runs the kernel's text on a CPU: built for one kind, fed with cases."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from engine.mlx_backend.gpu.kind import Kind
from engine.mlx_backend.gpu.source import text_of

HERE = Path(__file__).parent

FLAGS = ["-std=c++17", "-O1", "-fno-omit-frame-pointer", "-Wall", "-Wextra", "-Werror"]
FLAGS += ["-Wno-unused-parameter", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

Arrays = list[npt.NDArray[Any]]
"""The arrays of a case, in the order of `Array` in host.cpp."""


class Fault(Exception):
    """The text does not compile, or the program has found a fault and says which."""


PATIENCE_SECONDS = 120.0
"""Of all cases of a program, which take a few. A fault in the text may be an endless loop."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What both passes make of a case: the output's bytes, and the bytes of K and V that thread
    groups have read, each group a byte once, and how many different bytes these are.
    """

    output: bytes
    read_bytes: int
    distinct_bytes: int


def build(kind: Kind, folder: Path, compiler: str, text: str = "") -> Path:
    """The program for a kind, in `folder`. `text`: in place of that of paged.h, which alone may not
    have warnings: a fault that is put into it is to be noticed when it runs.

    Raises Fault where it does not compile.
    """
    (folder / "paged.h").write_text(text or text_of("paged.h"), encoding="utf-8")
    program = folder / "host"
    defines = [f"-D{name}={value}" for name, value in kind.defines().items()]
    files = [f"-I{folder}", str(HERE / "host.cpp"), "-o", str(program)]
    flags = [*FLAGS, "-Wno-error"] if text else FLAGS
    command = [*compiler.split(), *flags, *defines, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Fault(f"it does not compile: {done.stderr[:2000]}")
    return program


def run(program: Path, cases: Sequence[Arrays]) -> list[Outcome]:
    """What the program makes of each case. Raises Fault with the line that it prints for one.

    The sanitizer prints addresses and no names: to find these it calls functions that it checks,
    on the stack of a fiber, and can wait for itself.
    """
    given, results = program.with_name("cases"), program.with_name("results")
    given.write_bytes(b"".join(_framed(array.tobytes()) for case in cases for array in case))
    command = [str(program), str(given), str(results)]
    environment = {**os.environ, "ASAN_OPTIONS": "symbolize=0", "UBSAN_OPTIONS": "symbolize=0"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            timeout=PATIENCE_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise Fault("it does not end") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        found = (line for line in lines if "FAULT" in line or "ERROR" in line or "error" in line)
        raise Fault(next(found, lines[-1]))
    data, outcomes, at = results.read_bytes(), [], 0
    for line in done.stdout.splitlines():
        read_bytes, distinct_bytes = map(int, line.split())
        size = int.from_bytes(data[at : at + 8], "little")
        outcomes.append(Outcome(data[at + 8 : at + 8 + size], read_bytes, distinct_bytes))
        at += 8 + size
    return outcomes


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data
