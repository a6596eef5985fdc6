"""The C++ compiler with which MLX builds kernels for a CPU.

MLX writes C++ for each operation that it fuses, has g++ build a library of it, and keeps that in a
folder for temporary files. The step that needs a kernel waits for it.

g++ is not told for which processor, so on x86-64 it builds for the oldest: without AVX, and with a
call of the C library for each fused multiply-add, of which `exp` has several. On Linux the engine
therefore has a g++ of its own, a script that adds `PROCESSOR_FLAGS`, and a folder of its own for
kernels, named after the processor and the C library. What they compute is equal to the last bit.

Most of g++'s work is a header of MLX that each kernel includes. g++ looks for a precompiled one
next to the kernel's source first, so one is built there: a kernel then takes 0.2 s of a core in
place of 0.9, and the header 2.7 s, once (two x86 cores, g++ 12).
"""

import hashlib
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from fcntl import LOCK_EX, LOCK_SH, flock
from importlib import metadata
from pathlib import Path
from threading import Thread

import mlx.core as mx

from engine.api import one_line
from engine.process.child import ending
from engine.process.folders import cache_folder

HEADER = "mlx/backend/cpu/compiled_preamble.h"
"""The header that each kernel on Linux includes."""

PROCESSOR_FLAGS = (
    "-march=native",
    "-ffp-contract=off",  # round after each multiplication and each addition, as without the others
    "-fno-trapping-math",  # compute both sides of a selection, or loops with one stay scalar
    "-finline-limit=100000",  # and so do loops that call a function, such as MLX's `exp`
)
"""Let g++ vectorize kernels for this machine's processor. Two results may change: a negative number
that becomes the integer 0 and a float again is -0, and the integer of NaN, or of a number beyond
its range, is undefined.
"""

HEADER_SECONDS = 30 * 86_400
"""How long a precompiled header of 50 MB is kept without a use, where it is of another processor, C
library or version of MLX.
"""

REAL_COMPILER = "MLX_REAL_GXX"
"""The environment variable with the path of the g++ that the script runs."""

REAL_TEMPORARY = "MLX_REAL_TMPDIR"
"""The environment variable with the folder for g++'s temporary files."""

_SCRIPT = f"""#!/bin/sh
# MLX builds its kernels with this g++: for this machine's processor.
programs={{programs}}
PATH="${{{{PATH#"$programs":}}}}"  # the real one may be ccache, which looks for the next g++
TMPDIR="${REAL_TEMPORARY}"
for output; do :; done
case "$output" in
*.so)  # gets its name when it is complete: other engines load it, and the machine may go down
    part="$output.$$"
    "${REAL_COMPILER}" "$@" {{flags}} -o "$part" && {{{{
        sync "$part"
        exec mv -f "$part" "$output"
    }}}}
    status=$?
    rm -f "$part"
    exit "$status";;
esac
exec "${REAL_COMPILER}" "$@" {{flags}}
"""

_PROCESSOR = "model name", "flags", "CPU implementer", "CPU part", "Features"
"""The lines of /proc/cpuinfo that say which instructions a processor has."""

_FLAGS = ("-std=c++17", "-O3", "-Wall", "-fPIC", "-shared")
"""The flags that MLX gives g++, which ignores a header that was precompiled with others."""

_PROBE = f'#include "{HEADER}"\n' if sys.platform == "linux" else "#include <cmath>\n"

_FAILURE, _OUTPUT = "[Compile::eval_cpu]", "the output is:"
"""Parts of MLX's error for a kernel that cannot be built. What g++ has said follows the second."""

_NOT_LOADED, _NO_FOLDER = "Could not load C++ shared library", "temp_directory_path"
"""What MLX's errors say where a kernel cannot be loaded, and where TMPDIR has been deleted."""


class Compiler:
    """The compiler of a CPU's kernels. A thread prepares it while weights are read. From then on
    this process builds kernels for its processor: its environment is changed (`build_natively`).

    `is_first_start`: no kernels have been built on this machine, or they were deleted.
    """

    def __init__(self) -> None:
        if sys.platform == "linux" and os.environ.get(REAL_COMPILER) is None:
            with suppress(OSError, RuntimeError):  # such as a home that cannot be written to
                build_natively(os.environ, cache_folder() / "kernels")
        self.is_first_start = not any(kernel_folder().glob("*.so"))
        self._problem = ""
        self._thread = Thread(target=self._prepare, name="compiler", daemon=True)
        self._thread.start()

    def problem(self) -> str:
        """Why MLX cannot build kernels on this machine, in a few words; "" if it can. Waits until
        the compiler is prepared, and builds a kernel unless one like it was built before.
        """
        self._thread.join()
        if self._problem:
            return self._problem
        try:
            mx.eval(mx.compile(lambda x: x * x + x)(mx.arange(3.0)))
        except Exception as error:  # MLX may raise anything
            return failure_of_compiler(error) or one_line(error)
        return ""

    def _prepare(self) -> None:
        folder = kernel_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "rootstock.lock").open("w") as lock:
                flock(lock, LOCK_EX)  # or two engines would build the same header
                _remove_truncated(folder)
                self._problem = _prepare_in(folder)
        except OSError as error:
            self._problem = f"the folder of MLX's kernels cannot be used: {error}"


def start_compiler() -> Compiler | None:
    """Begin to prepare the compiler in a thread; None on a GPU, whose kernels it does not build."""
    return Compiler() if mx.default_device() == mx.cpu else None


def failure_of_compiler(error: Exception) -> str:
    """Why a kernel could not be built or loaded, in one line: what g++ has said, if it failed; ""
    for an error of another kind.
    """
    if _NOT_LOADED in str(error):
        remedy = f"if it is damaged, delete {kernel_folder()} while no daemon runs"
        return f"a kernel cannot be used: {one_line(error)}; {remedy}"
    if _NO_FOLDER in str(error):
        return f"a kernel cannot be used: {one_line(error)}"
    if _FAILURE not in str(error):
        return ""
    before, _, output = str(error).partition(_OUTPUT)
    return f"g++ fails: {_first_error(output.splitlines()) or before[:300]}"


def kernel_folder() -> Path:
    """The folder in which MLX keeps kernels of CPUs, on this machine for this version of MLX."""
    temporary = os.environ.get("TMPDIR") or tempfile.gettempdir()
    return Path(temporary) / "mlx" / metadata.version("mlx") / "cpu"


def build_natively(environment: MutableMapping[str, str], folder: Path) -> None:
    """Have MLX build kernels for this processor and keep them in a folder within this one: `TMPDIR`
    and `PATH` say so. Without a g++ that takes the flags the environment stays as it is. Raises
    OSError where the folder cannot be used, or no program in it may be executed.
    """
    found = shutil.which("g++", path=environment.get("PATH"))
    if found is None:
        return
    digest = hashlib.blake2b(digest_size=8)
    # A home may be shared with machines and containers whose processor or C library is older.
    processor = _processor(Path("/proc/cpuinfo").read_text())
    for part in (*processor, *PROCESSOR_FLAGS, *platform.libc_ver()):
        digest.update(f"{part}\n".encode())
    own = folder / digest.hexdigest()
    programs = own / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    with (own / "lock").open("a+") as lock:
        flock(lock, LOCK_SH)  # raises where there are no locks, as on some network drives
    script = _SCRIPT.format(programs=shlex.quote(str(programs)), flags=" ".join(PROCESSOR_FLAGS))
    program = programs / "g++"
    if not program.exists() or program.read_text() != script:
        written = programs / f"g++.{os.getpid()}"
        written.write_text(script)
        written.chmod(0o755)
        written.replace(program)
    changes = {
        REAL_COMPILER: found,
        REAL_TEMPORARY: tempfile.gettempdir(),  # Python's own files stay there, too
        "PATH": os.pathsep.join([str(programs), environment.get("PATH", "")]),
        "TMPDIR": str(own),
    }
    command = [str(program), "-fsyntax-only", "-x", "c++", os.devnull]
    done = subprocess.run(command, capture_output=True, check=False, env={**environment, **changes})
    if done.returncode == 0:
        environment.update(changes)
        _remove_unused_headers(folder)


def _remove_unused_headers(folder: Path) -> None:
    """Delete old precompiled headers of all folders of kernels within this one. Kernels stay: they
    are small, and an engine on another machine may have them in use.
    """
    least_seconds = time.time() - HEADER_SECONDS
    for header in folder.glob(f"*/mlx/*/cpu/{HEADER}.gch/*"):
        with suppress(FileNotFoundError):
            if header.stat().st_mtime < least_seconds:
                header.unlink()


def _remove_truncated(folder: Path) -> None:
    """Delete kernels that end too early, as after a fault of the disk: MLX loads whatever there is,
    and builds what there is not. Where they cannot be deleted, MLX reports them.
    """
    for kernel in folder.glob("*.so"):
        with suppress(OSError):
            if not _is_whole(kernel):
                kernel.unlink()


def _is_whole(library: Path) -> bool:
    """Whether a file is as long as the ELF header of a library says. Others count as whole."""
    with library.open("rb") as file:
        header = file.read(64)
    if header[:6] != b"\x7fELF\x02\x01":  # 64 bits, the least significant byte first
        return len(header) > 0
    if len(header) < 64:
        return False
    (sections,) = struct.unpack_from("<Q", header, 40)  # a table, which comes last
    size, n_sections = struct.unpack_from("<HH", header, 58)
    n_bytes: int = sections + size * n_sections
    return library.stat().st_size >= n_bytes


def _processor(cpuinfo: str) -> list[str]:
    """The lines that describe the first processor."""
    first = cpuinfo.partition("\n\n")[0].splitlines()
    return [line for line in first if line.split("\t")[0].strip() in _PROCESSOR]


def _prepare_in(folder: Path) -> str:
    """Precompile the header into the folder, unless that has been done for this g++. Returns why
    g++ cannot compile, or "". Raises OSError.
    """
    if (found := shutil.which("g++")) is None:
        return "there is no g++"
    include = Path(mx.__file__).parent / "include"
    flags = *_FLAGS, "-I", str(include)  # the script adds its own
    # g++ tries each file of a folder with this name, and takes the one that it has made.
    headers = folder / f"{HEADER}.gch"
    if sys.platform == "linux":
        program = Path(os.environ.get(REAL_COMPILER, found)).resolve()
        changed = program.stat()
        version = f"{program} {changed.st_size} {changed.st_mtime_ns} {include}"
        header = headers / hashlib.blake2b(version.encode(), digest_size=8).hexdigest()
        if header.exists():
            os.utime(header)  # it is in use: see `_remove_unused_headers`
        else:
            shutil.rmtree(headers, ignore_errors=True)
            arguments = (*flags, "-x", "c++-header", str(include / HEADER))
            _precompile(arguments, folder / "rootstock-header.part", header)
    if not (problem := _probe(flags, folder)) or not headers.exists():
        return problem
    shutil.rmtree(headers)  # it may be damaged, and no kernel could be built
    return _probe(flags, folder)


def _precompile(arguments: Sequence[str], part: Path, header: Path) -> None:
    """Have g++ write `part`, which becomes `header`. Where it fails, each kernel takes longer."""
    done = subprocess.run(["g++", *arguments, "-o", str(part)], capture_output=True, check=False)
    if done.returncode == 0:
        header.parent.mkdir(parents=True, exist_ok=True)
        part.replace(header)
    else:
        part.unlink(missing_ok=True)


def _probe(flags: Sequence[str], folder: Path) -> str:
    """Why g++ cannot compile what all kernels include, in a few words; "" if it can."""
    command = ["g++", *flags, "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(
        command, input=_PROBE, capture_output=True, text=True, cwd=folder, check=False
    )
    if done.returncode == 0:
        return ""
    return f"g++ fails: {_first_error(done.stderr.splitlines()) or ending(done.returncode)}"


def _first_error(lines: Sequence[str]) -> str:
    """The first line of g++'s output that reports an error, or else the first line; or ""."""
    lines = [line.strip() for line in lines if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "")
