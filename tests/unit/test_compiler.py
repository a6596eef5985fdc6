"""The compiler with which MLX builds kernels for a CPU. A script stands for g++."""

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import TextIO

import mlx.core as mx
import pytest

from engine.mlx_backend.loading.compiler import (
    HEADER,
    PROCESSOR_FLAGS,
    REAL_COMPILER,
    REAL_TEMPORARY,
    Compiler,
    build_natively,
    failure_of_compiler,
    kernel_folder,
    start_compiler,
)

REAL = os.environ.get(REAL_COMPILER) or which("g++")
linux = pytest.mark.skipif(sys.platform != "linux", reason="no header is precompiled")

WRITES = """
while [ "$#" -gt 1 ]; do shift; [ "$1" = -o ] && output="$2"; done
[ -z "$output" ] || echo "precompiled" > "$output"
"""
"""Writes what it is to write: as g++ does, at the last place that it is given."""

WORKS = f"{WRITES}cat > /dev/null\n"
"""Reads its input, too."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kernels, in a temporary folder of its own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv(REAL_COMPILER, str(tmp_path / "programs" / "g++"))  # it is set up already
    monkeypatch.setenv(REAL_TEMPORARY, str(tmp_path))
    return kernel_folder()


@pytest.fixture(autouse=True)
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script builds none that could be loaded."""
    monkeypatch.setattr(mx, "compile", lambda function: function)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which g++ is found."""
    found = tmp_path / "programs"
    found.mkdir()
    monkeypatch.setenv("PATH", f"{found}{os.pathsep}/bin{os.pathsep}/usr/bin")
    return found


def install(programs: Path, script: str) -> None:
    """A g++ that notes how it was called, in the file `calls`."""
    program = programs / "g++"
    program.write_text(f'#!/bin/sh\necho "$*" >> {programs}/calls\n{script}\n')
    program.chmod(0o755)


def builds_of_header(programs: Path) -> int:
    return (programs / "calls").read_text().count("c++-header")


def headers(folder: Path) -> list[Path]:
    return sorted((folder / f"{HEADER}.gch").glob("*"))


def test_a_machine_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Compiler().problem() == "there is no g++"


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (
            "cat > /dev/null; echo In file included from here: >&2\n"
            "echo 'fatal error: cmath: No such file' >&2; echo more >&2; exit 1",
            "g++ fails: fatal error: cmath: No such file",
        ),
        ("cat > /dev/null; echo no licence >&2; exit 1", "g++ fails: no licence"),
        ("exit 4", "g++ fails: exit status 4"),
        ("kill -9 $$", "g++ fails: SIGKILL"),
    ],
)
def test_a_compiler_that_fails(programs: Path, folder: Path, script: str, problem: str) -> None:
    install(programs, script)
    assert Compiler().problem() == problem
    assert not headers(folder)


def test_a_folder_that_cannot_be_made(programs: Path, folder: Path) -> None:
    install(programs, WORKS)
    folder.parents[2].touch()
    problem = Compiler().problem()
    assert problem.startswith("the folder of MLX's kernels cannot be used: ")


def test_kernels_that_cannot_be_loaded(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a folder in which nothing may be executed."""

    def fail(values: mx.array) -> mx.array:
        raise RuntimeError("Could not load C++ shared library libx.so:\n Operation not permitted")

    install(programs, WORKS)
    monkeypatch.setattr(mx, "compile", lambda function: fail)
    problem = Compiler().problem()
    assert "Operation not permitted" in problem
    assert f"delete {kernel_folder()}" in problem


@linux
def test_kernels_that_were_cut_off_are_deleted(programs: Path, folder: Path) -> None:
    """MLX builds them anew. Others stay."""
    install(programs, WORKS)
    spec = find_spec("msgspec._core")  # Python may have its own modules built in
    assert spec is not None
    assert spec.origin is not None
    library = Path(spec.origin).read_bytes()
    contents = {"whole": library, "cut": library[:-1], "begun": library[:40], "empty": b""}
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / f"{name}.so").write_bytes(content)
    (folder / "other.so").write_text("no library of this machine")
    assert Compiler().problem() == ""
    assert {kernel.stem for kernel in folder.glob("*.so")} == {"whole", "other"}


@linux
def test_the_header_is_precompiled_once(programs: Path, folder: Path) -> None:
    install(programs, WORKS)
    assert [Compiler().problem(), Compiler().problem()] == ["", ""]
    assert builds_of_header(programs) == 1
    assert len(headers(folder)) == 1


@linux
def test_engines_that_start_at_once_precompile_one_header(programs: Path) -> None:
    install(programs, WORKS)
    compilers = [Compiler() for _ in range(4)]
    assert [one.problem() for one in compilers] == [""] * 4
    assert builds_of_header(programs) == 1


@linux
def test_another_compiler_precompiles_a_header_of_its_own(programs: Path, folder: Path) -> None:
    """The old one would be tried for each kernel, in vain."""
    install(programs, WORKS)
    assert Compiler().problem() == ""
    first = headers(folder)
    install(programs, WORKS + "# a newer version")
    assert Compiler().problem() == ""
    second = headers(folder)
    assert len(second) == 1
    assert second != first


@linux
def test_a_header_that_cannot_be_precompiled(programs: Path, folder: Path) -> None:
    """Kernels take longer to build, and no more."""
    install(programs, 'case "$*" in *c++-header*) exit 1;; esac\n' + WORKS)
    assert Compiler().problem() == ""
    assert not headers(folder)


@linux
def test_a_damaged_header_is_removed(programs: Path, folder: Path) -> None:
    """Or no kernel could be built: g++ reads it, and fails."""
    install(programs, WORKS)
    assert Compiler().problem() == ""
    (header,) = headers(folder)
    header.write_text("damaged")
    install(programs, f'grep -qs damaged "{header}" && exit 1\n' + WORKS)
    newer = (programs / "g++").stat()
    os.utime(programs / "g++", ns=(newer.st_atime_ns, newer.st_mtime_ns))
    assert Compiler().problem() == ""
    assert "damaged" not in [one.read_text() for one in headers(folder)]


@linux
@pytest.mark.skipif(REAL is None, reason="there is no g++")
def test_a_compiler_that_works(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the header that it has precompiled, for a kernel as MLX builds it."""
    monkeypatch.setenv(REAL_COMPILER, str(REAL))
    assert Compiler().problem() == ""
    (header,) = headers(folder)
    kernel = folder / "kernel.cpp"
    kernel.write_text(f'#include "{HEADER}"\nextern "C" void kernel() {{}}\n')
    include = Path(mx.__file__).parent / "include"
    command = ["g++", "-std=c++17", "-O3", "-Wall", "-fPIC", "-shared", "-I", str(include)]
    command += ["-H", str(kernel), "-o", str(folder / "kernel.so")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[0] == f"! {header}"


@linux
def test_kernels_are_built_for_the_processor(programs: Path, tmp_path: Path) -> None:
    """MLX's command, with the flags after it. Each processor has kernels of its own."""
    install(programs, WRITES)
    environment = {"PATH": f"{programs}{os.pathsep}/bin"}
    build_natively(environment, tmp_path / "kernels")
    (own,) = (tmp_path / "kernels").iterdir()
    assert environment["TMPDIR"] == str(own)
    (programs / "calls").unlink()
    command = "g++ -O3 kernel.cpp -o kernel.so"
    subprocess.run(command, shell=True, check=True, env=environment, cwd=tmp_path)
    called = (programs / "calls").read_text()
    assert called.startswith(f"-O3 kernel.cpp -o kernel.so {' '.join(PROCESSOR_FLAGS)} -o ")


@linux
def test_temporary_files_of_the_compiler_stay_where_they_are(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home may be slow, and nobody removes what a compiler that was killed has left there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "chosen"))
    install(programs, f'echo "$TMPDIR" > {programs}/temporary')
    environment = {"PATH": f"{programs}{os.pathsep}/bin"}
    build_natively(environment, tmp_path / "kernels")
    for output in ("kernel.so", "kernel.gch"):
        (programs / "temporary").unlink()
        command = f"g++ kernel.cpp -o {output}"
        subprocess.run(command, shell=True, check=False, env=environment, cwd=tmp_path)
        assert (programs / "temporary").read_text() == f"{tmp_path}/chosen\n"


@linux
def test_a_kernel_gets_its_name_when_it_is_complete(programs: Path, tmp_path: Path) -> None:
    """Another engine would load half of one; and one that was cut off would stay, in a home."""
    install(programs, f"{WRITES}ls {tmp_path} > {tmp_path}/meanwhile")
    (programs / "sync").write_text(
        f'#!/bin/sh\ntest -e {tmp_path}/kernel.so || cp "$1" {tmp_path}/synced'
    )
    (programs / "sync").chmod(0o755)
    environment = {"PATH": f"{programs}{os.pathsep}/bin"}
    build_natively(environment, tmp_path / "kernels")
    command = "g++ kernel.cpp -o kernel.so"
    subprocess.run(command, shell=True, check=True, env=environment, cwd=tmp_path)
    assert "kernel.so\n" not in (tmp_path / "meanwhile").read_text()
    assert (tmp_path / "kernel.so").read_text() == "precompiled\n"
    assert (tmp_path / "synced").read_text() == "precompiled\n"
    install(programs, f"{WRITES}echo no >&2; exit 3")
    command = "g++ other.cpp -o other.so"
    done = subprocess.run(
        command, shell=True, capture_output=True, check=False, env=environment, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (3, b"no\n")
    assert not list(tmp_path.glob("other*"))


@linux
@pytest.mark.parametrize("output", ["kernel.so", "kernel.gch"])
def test_a_compiler_that_looks_for_the_next_one_finds_it(
    programs: Path, tmp_path: Path, output: str
) -> None:
    """ccache's g++ does. If it found the engine's script, the two would call each other."""
    real = tmp_path / "real folder"
    real.mkdir()
    (real / "g++").write_text(f'#!/bin/sh\necho "$*" >> "{real}/calls"\n{WRITES}')
    (real / "g++").chmod(0o755)
    install(programs, f'PATH="${{PATH#{programs}:}}"; exec g++ "$@"')
    before = os.pathsep.join([str(programs), str(real), "/bin"])
    environment = {"PATH": before}
    build_natively(environment, tmp_path / "the kernels")
    assert environment["PATH"] == os.pathsep.join([environment["TMPDIR"] + "/bin", before])
    command = f"timeout 5 g++ kernel.cpp -o {output}"
    subprocess.run(command, shell=True, check=True, env=environment, cwd=tmp_path)
    assert len((real / "calls").read_text().splitlines()) == 2
    assert (tmp_path / output).exists()


@linux
def test_processors_have_kernels_of_their_own(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines may share a home, and the instructions of one are unknown to the other."""
    install(programs, "")
    folders = list[str]()
    for flags in ("avx", "avx avx2", "avx"):
        cpuinfo = f"processor\t: 0\ncpu MHz\t\t: 2100\nflags\t\t: {flags}\n\nprocessor\t: 1\n"
        monkeypatch.setattr(Path, "read_text", lambda path, text=cpuinfo: text)
        environment = {"PATH": str(programs)}
        build_natively(environment, tmp_path / "kernels")
        folders.append(environment["TMPDIR"])
    assert folders[0] == folders[2] != folders[1]


@linux
def test_headers_that_are_not_used_any_more_are_removed(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes 50 MB, and unlike a folder for temporary files a home is never emptied."""
    install(programs, WORKS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    path = os.environ["PATH"]

    def start(library: str) -> Path:
        """Start an engine on a machine with this C library. Returns the header."""
        monkeypatch.setattr(os, "confstr", lambda name: library)
        monkeypatch.setenv("PATH", path)
        monkeypatch.delenv(REAL_COMPILER)
        assert Compiler().problem() == ""
        (header,) = headers(kernel_folder())
        return header

    def pass_by(days: int) -> None:
        for header in (tmp_path / "home").rglob("*.gch/*"):
            found = header.stat().st_mtime - 86_400 * days
            os.utime(header, (found, found))

    old, new = start("glibc 2.36"), start("glibc 2.41")
    pass_by(20)
    assert start("glibc 2.41") == new
    pass_by(20)
    assert start("glibc 2.41") == new
    assert [old.exists(), new.exists()] == [False, True]
    assert builds_of_header(programs) == 2


@linux
def test_c_libraries_have_kernels_of_their_own(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers may share a home, and a kernel that needs a newer library cannot be loaded."""
    install(programs, "")
    folders = set[str]()
    for version in ("glibc 2.36", "glibc 2.41"):
        monkeypatch.setattr(os, "confstr", lambda name, version=version: version)
        environment = {"PATH": str(programs)}
        build_natively(environment, tmp_path / "kernels")
        folders.add(environment["TMPDIR"])
    assert len(folders) == 2


@linux
@pytest.mark.parametrize("script", ["", 'case "$*" in *native*) exit 1;; esac'])
def test_where_kernels_cannot_be_built_for_the_processor_mlx_is_left_alone(
    programs: Path, tmp_path: Path, script: str
) -> None:
    """There is no g++, or it does not take the flags."""
    if script:
        install(programs, script)
    environment = {"PATH": str(programs)}
    build_natively(environment, tmp_path / "kernels")
    assert environment == {"PATH": str(programs)}


@linux
def test_a_home_that_cannot_be_written_to(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are kept where MLX keeps them, and built as it builds them."""
    install(programs, WORKS)
    monkeypatch.delenv(REAL_COMPILER)
    (tmp_path / "home").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    before = dict(os.environ)
    assert Compiler().problem() == ""
    assert dict(os.environ) == before


def forbid_programs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "chmod", lambda path, mode: None)


def forbid_locks(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lock(file: TextIO, kind: int) -> None:
        if Path(file.name).is_relative_to(home):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("engine.mlx_backend.loading.compiler.flock", lock)


@linux
@pytest.mark.parametrize("forbid", [forbid_programs, forbid_locks])
def test_a_home_in_which_no_program_or_no_lock_is_possible(
    programs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forbid: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    """Where a script may not run, no kernel could be loaded. MLX is left alone, and works."""
    install(programs, WORKS)
    monkeypatch.delenv(REAL_COMPILER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    forbid(tmp_path / "home", monkeypatch)
    before = dict(os.environ)
    assert Compiler().problem() == ""
    assert dict(os.environ) == before


FUSED = """
import mlx.core as mx
special = mx.array([float("nan"), float("inf"), -float("inf"), -0.0])
x = mx.concatenate([mx.linspace(-100, 100, 10_001), special])
y = mx.linspace(3, -3, x.size)
functions = [
    lambda x, y: mx.sigmoid(x) * x * y,
    lambda x, y: mx.exp(x) + y,
    lambda x, y: mx.erf(x) * y + x * y,
    lambda x, y: mx.tanh(y) * x - y,
    lambda x, y: mx.where(x > y, x * y + 1, mx.rsqrt(x * x + 1) / y),
    lambda x, y: mx.maximum(x, y) * mx.minimum(x, 0.5) - mx.sqrt(mx.abs(y)),
    lambda x, y: mx.log(mx.abs(x) + 1) * mx.sin(y) * mx.cos(x),
    lambda x, y: (y * 1000).astype(mx.int32).astype(mx.float32) + x * y,
]
with mx.stream(mx.cpu):
    for function in functions:
        print(bytes(memoryview(mx.compile(function)(x, y))).hex())
"""


@linux
@pytest.mark.skipif(REAL is None, reason="there is no g++")
def test_kernels_for_the_processor_compute_the_same_bits(tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "g++").symlink_to(str(REAL))
    found = list[str]()
    for name in ("plain", "native"):
        (tmp_path / name).mkdir()
        environment = {**os.environ, "TMPDIR": str(tmp_path / name)}
        environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
        if name == "native":
            build_natively(environment, tmp_path / name)
            assert environment["TMPDIR"] != str(tmp_path / name)
        command = [sys.executable, "-c", FUSED]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found.append(done.stdout)
        assert list(Path(environment["TMPDIR"]).rglob("*.so"))
    assert found[0] == found[1]
    assert len(found[0].splitlines()) == 8


def test_a_gpu_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert start_compiler() is None


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("[matmul] shapes do not fit", ""),
        (
            "[Compile::eval_cpu] Failed to compile function Add: Failed to execute command with "
            'return code 1: "g++ 2>&1", the output is: a.cpp: In function f:\na.cpp:3: error: no\n',
            "g++ fails: a.cpp:3: error: no",
        ),
        (
            "[Compile::eval_cpu] Failed to load it",
            "g++ fails: [Compile::eval_cpu] Failed to load it",
        ),
        (
            "Could not load C++ shared library a.so: file too short",
            "a kernel cannot be used: Could not load C++ shared library a.so: file too short",
        ),
        (
            "filesystem error: temp_directory_path: Not a directory [a]",
            "a kernel cannot be used: filesystem error: temp_directory_path: Not a directory [a]",
        ),
    ],
)
def test_what_a_failure_of_the_compiler_says(message: str, expected: str) -> None:
    failure, _, remedy = failure_of_compiler(RuntimeError(message)).partition("; if it is damaged,")
    assert failure == expected
    assert bool(remedy) == ("shared library" in message)
