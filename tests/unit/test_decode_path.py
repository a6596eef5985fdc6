"""The choice between compiled and eager decodes, and the process that builds kernels for it."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fcntl import LOCK_EX, flock
from pathlib import Path
from shutil import copytree, which

import mlx.core as mx
import pytest

from engine.mlx_backend import assembly
from engine.mlx_backend.batch import BatchRow
from engine.mlx_backend.cpu.blas import load_blas
from engine.mlx_backend.decode import choice, kernels
from engine.mlx_backend.decode.choice import BUILD_AFTER_STEPS, HALF_TOLERANCE, DecodePath
from engine.mlx_backend.decode.compiled import CompiledDecode
from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT
from engine.mlx_backend.loading.selfcheck import tolerance
from engine.mlx_backend.model.cached_model import CachedModel
from engine.mlx_backend.model.layout import Layout
from engine.mlx_backend.model.views import Attention
from engine.values.settings import AdapterConfig, EngineConfig
from engine.values.stats import DecodeStats
from tests.checkpoints import FAMILIES, SHALLOW, write_family
from tests.devices import cpu_attention
from tests.offline import Room, cached_model, load
from tests.polling import WAIT_SECONDS

Forward = Callable[..., mx.array | None]

BUILD_SECONDS = 300.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CachedModel:
    """Of one layer."""
    served = load(write_family(SHALLOW, tmp_path_factory.mktemp("models")))
    return cached_model(served, Attention(), Room(n_blocks=4))


@pytest.fixture
def compiled_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    race(monkeypatch, {"eager": 0.02, "compiled": 0.01})


def race(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
    """Let the rehearsal's steps take this time, by the path."""
    monkeypatch.setattr(choice, "_seconds", lambda _, step: seconds[step.__name__])


def chosen(model: CachedModel) -> DecodePath:
    path = DecodePath("not chosen yet")
    path.choose(model)
    return path


@pytest.mark.usefixtures("compiled_is_faster")
def test_right_and_faster(model: CachedModel) -> None:
    path = chosen(model)
    assert path.compiled is not None
    assert path.why.startswith("compiled: a compiled step takes, of an eager one's time, 0.50 at 1")
    assert path.stats() == DecodeStats(path.why, steps=0, compiled_steps=0)


def test_slower(model: CachedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    race(monkeypatch, {"eager": 0.02, "compiled": 0.03})
    path = chosen(model)
    assert path.compiled is None
    assert path.why.startswith("eager: a compiled step takes, of an eager one's time, 1.50 at 1")


def test_faster_for_one_row_alone(model: CachedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then steps of several rows are eager."""
    ratio = choice._ratio
    seconds = {"eager": 0.02, "compiled": 0.0}

    def begin(model: CachedModel, n_rows: int) -> float:
        seconds["compiled"] = 0.01 if n_rows == 1 else 0.04
        return ratio(model, n_rows)

    monkeypatch.setattr(choice, "_ratio", begin)
    race(monkeypatch, seconds)
    path = chosen(model)
    assert path.compiled is not None
    assert path.why.startswith("compiled: ")
    rows = [object()] * 2
    assert path.compiled.forward(rows, mx.zeros) is None  # type: ignore[arg-type]
    assert path.compiled.steps == {"eager steps are faster for this number of rows": 1}


def test_an_eager_step_that_takes_long(model: CachedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's share of it would not be worth the rehearsal."""
    race(monkeypatch, {"eager": 2.0, "compiled": 1.0})
    path = chosen(model)
    assert path.compiled is None
    assert path.why == "eager: an eager step takes 0.67 s, little of it on the host"


def patch_forward(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[mx.array], mx.array | None]
) -> None:
    """Change the logits of compiled steps."""
    forward = CompiledDecode.forward

    def changed(
        compiled: CompiledDecode, rows: Sequence[BatchRow], tokens: Callable[[int], mx.array]
    ) -> mx.array | None:
        logits = forward(compiled, rows, tokens)
        return None if logits is None else change(logits)

    monkeypatch.setattr(CompiledDecode, "forward", changed)


@pytest.mark.usefixtures("compiled_is_faster")
def test_other_logits(model: CachedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_forward(monkeypatch, lambda logits: logits * 1.5)
    path = chosen(model)
    assert path.compiled is None
    assert path.why == "eager: its logits are wrong by 50.0% of their size"


@pytest.mark.usefixtures("compiled_is_faster")
def test_in_float32_they_differ_by_no_more_than_the_check_at_load_allows(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten times as much is nothing in half precision."""
    patch_forward(monkeypatch, lambda logits: logits * 1.001)
    assert chosen(model).why == "eager: its logits are wrong by 0.1% of their size"


def test_in_half_precision_they_differ_by_more() -> None:
    layout = Layout((), mx.bfloat16, vocab_size=8)
    assert tolerance(layout, HALF_TOLERANCE) == HALF_TOLERANCE > tolerance(layout)


@pytest.mark.usefixtures("compiled_is_faster")
def test_logits_that_are_no_numbers(model: CachedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_forward(monkeypatch, lambda logits: logits * mx.nan)
    path = chosen(model)
    assert path.compiled is None
    assert path.why.startswith("eager: its logits are wrong")


@pytest.mark.usefixtures("compiled_is_faster")
def test_another_token_is_the_likeliest(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the logits as a whole are hardly wrong."""
    monkeypatch.setattr(choice, "deviation", lambda found, expected: 0.0)
    patch_forward(monkeypatch, lambda logits: -logits)
    path = chosen(model)
    assert path.compiled is None
    assert path.why == "eager: its likeliest tokens are others"


def _no_logits(logits: mx.array) -> mx.array:
    raise ValueError("[multiply] no such thing\nas this")


@pytest.mark.usefixtures("compiled_is_faster")
def test_a_model_that_raises(model: CachedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_forward(monkeypatch, _no_logits)
    path = chosen(model)
    assert path.compiled is None
    assert path.why.startswith("eager: ValueError: ")
    assert "\n" not in path.why


def test_a_model_that_cannot_be_traced(model: CachedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that wants a number's value."""

    def fail(*_: object) -> None:
        raise RuntimeError("[eval] attempting to eval an array during a transformation")

    monkeypatch.setattr(mx, "compile", lambda step: fail)
    path = chosen(model)
    assert path.compiled is None
    assert "during a transformation" in path.why


# What builds kernels.


Start = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that runs some Python, in place of one that builds kernels."""
    started = list["subprocess.Popen[bytes]"]()

    def run(code: str) -> "subprocess.Popen[bytes]":
        started.append(subprocess.Popen([sys.executable, "-S", "-c", code]))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The models for which a path is chosen, in place of the choice."""
    found = list[object]()

    def choose(path: DecodePath, model: CachedModel) -> None:
        found.append(model)
        path.why = "chosen"

    monkeypatch.setattr(DecodePath, "choose", choose)
    return found


def building(builder: "subprocess.Popen[bytes]", model: CachedModel) -> DecodePath:
    path = DecodePath("its kernels are being built")
    path.choose_after(lambda: builder, model)
    path.build()
    return path


def test_kernels_are_built_once_the_model_has_decoded_for_a_while(
    model: CachedModel, start: Start
) -> None:
    started, path = list["subprocess.Popen[bytes]"](), DecodePath("its kernels are built later")

    def begin() -> "subprocess.Popen[bytes]":
        started.append(start(""))
        return started[-1]

    path.choose_after(begin, model)
    for _ in range(BUILD_AFTER_STEPS - 1):
        assert path.is_pending
        path.count_steady()
    assert not started
    path.count_steady()
    assert len(started) == 1
    assert not path.is_pending
    path.close()


def test_where_no_process_can_be_started_decodes_are_eager(model: CachedModel) -> None:
    def fail() -> "subprocess.Popen[bytes]":
        raise OSError("no room")

    path = DecodePath("its kernels are built later")
    path.choose_after(fail, model)
    path.build()
    assert path.why == "eager: no process can be started to build its kernels: no room"
    assert path.stats().problem == "no process can be started to build its kernels: no room"
    path.settle()
    assert path.compiled is None


def test_while_kernels_are_built_nothing_is_chosen(
    model: CachedModel, start: Start, choices: list[object]
) -> None:
    path = building(start("import time; time.sleep(60)"), model)
    path.settle()
    assert not choices
    assert path.compiled is None
    assert path.stats().why == "eager: its kernels are being built"


def test_once_kernels_are_there_a_path_is_chosen_once(
    model: CachedModel, start: Start, choices: list[object]
) -> None:
    builder = start("")
    path = building(builder, model)
    builder.wait(WAIT_SECONDS)
    for _ in range(3):
        path.settle()
    assert choices == [model]
    assert path.stats().why == "chosen"


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("raise SystemExit(3)", "exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
    ],
)
def test_where_kernels_cannot_be_built_decodes_are_eager(
    model: CachedModel, start: Start, choices: list[object], code: str, ending: str
) -> None:
    builder = start(code)
    path = building(builder, model)
    builder.wait(WAIT_SECONDS)
    path.settle()
    assert not choices
    assert path.compiled is None
    assert path.why == f"eager: building its kernels ended with {ending}"
    assert path.stats().problem == f"building its kernels ended with {ending}"


def test_the_process_that_builds_ends_with_the_engine(
    model: CachedModel, start: Start, choices: list[object]
) -> None:
    builder = start("import time; time.sleep(60)")
    path = building(builder, model)
    path.close()
    assert builder.poll() is not None
    path.close()
    path.settle()
    assert not choices


def test_one_path_without_a_builder_is_closed_and_settled() -> None:
    path = DecodePath("as set")
    path.settle()
    path.close()
    assert path.stats() == DecodeStats("eager: as set", 0, 0)


# The compiler of a CPU's kernels.


def compiler(folder: Path, script: str) -> None:
    program = folder / "g++"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kernels.compiler_problem() == "there is no g++"


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (
            "echo 'fatal error: cmath: No such file' >&2; echo more >&2; exit 1",
            "g++ fails: fatal error: cmath: No such file",
        ),
        ("exit 4", "g++ fails: exit status 4"),
    ],
)
def test_a_compiler_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, problem: str
) -> None:
    """Although it says its version, as where its headers are missing."""
    compiler(tmp_path, f'[ "$1" = --version ] && exit 0\ncat > /dev/null\n{script}')
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert kernels.compiler_problem() == problem


@pytest.mark.skipif(which("g++") is None, reason="there is no g++")
def test_a_compiler_that_works() -> None:
    assert kernels.compiler_problem() == ""


# The note that kernels have been built.


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint's config.json, and a temporary folder of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "config.json").write_text('{"layers": 1}')
    return tmp_path


CONFIG = EngineConfig("model", block_size=16)


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, block_size=32),
        replace(CONFIG, attention="gather"),
        replace(CONFIG, adapters=(AdapterConfig("a", Path("a")),)),
    ],
)
def test_other_settings_need_other_kernels(checkpoint: Path, config: EngineConfig) -> None:
    assert kernels.marker(config, checkpoint) != kernels.marker(CONFIG, checkpoint)


def test_settings_that_change_no_step_need_no_other_kernels(checkpoint: Path) -> None:
    config = replace(CONFIG, max_running=3, kv_cache_bytes=1 << 30, speculate="off")
    assert kernels.marker(config, checkpoint) == kernels.marker(CONFIG, checkpoint)


def test_another_model_needs_other_kernels(checkpoint: Path) -> None:
    before = kernels.marker(CONFIG, checkpoint)
    (checkpoint / "config.json").write_text('{"layers": 2}')
    assert kernels.marker(CONFIG, checkpoint) != before


def test_another_version_of_the_backend_needs_other_kernels(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kernels.marker(CONFIG, checkpoint)
    source = Path(kernels.__file__)
    copy = checkpoint / "mlx_backend"
    copytree(source.parents[1], copy)
    monkeypatch.setattr(kernels, "__file__", str(copy / "decode" / source.name))
    assert kernels.marker(CONFIG, checkpoint) == before
    with (copy / "model" / "added.py").open("w") as added:
        added.write("# more\n")
    assert kernels.marker(CONFIG, checkpoint) != before


# The kernels themselves.


def serve(checkpoint: Path, path: str, folder: Path) -> list[int]:
    """What `count_kernels` prints, with this temporary folder."""
    command = [sys.executable, "-m", "tests.unit.count_kernels", str(checkpoint), path]
    done = subprocess.run(
        command, check=True, capture_output=True, env={**os.environ, "TMPDIR": str(folder)}
    )
    return list(map(int, done.stdout.split()))


def use_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty temporary folder, for this process and those that it starts from now on."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))


PREAMBLE = "mlx/backend/cpu/compiled_preamble.h"
"""The header that every kernel of MLX includes."""


def precompile_preamble(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a g++ first on the PATH that has parsed PREAMBLE already: four fifths of its work."""
    compiler, header = which("g++"), Path(mx.__file__).parent / "include" / PREAMBLE
    precompiled = folder / "include" / f"{PREAMBLE}.gch"
    precompiled.parent.mkdir(parents=True)
    options = ("-std=c++17", "-O3", "-fPIC", "-w", f"-I{header.parents[3]}")
    command = [str(compiler), *options, "-x", "c++-header", str(header), "-o", str(precompiled)]
    subprocess.run(command, check=True)
    programs = folder / "bin"
    programs.mkdir()
    script = programs / "g++"
    script.write_text(f'#!/bin/sh\nexec {compiler} -I{folder / "include"} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)


@cpu_attention
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(which("g++") is None, reason="there is no g++")
def test_no_kernel_is_built_within_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, folder = write_family(FAMILIES["qwen3"], tmp_path), tmp_path / "temporary"
    execution = load(checkpoint).execution
    folder.mkdir()
    use_folder(folder, monkeypatch)
    precompile_preamble(tmp_path / "precompiled", monkeypatch)
    config = EngineConfig(str(checkpoint), block_size=8, memory_bytes=1 << 30)
    before, after, _ = serve(checkpoint, "unbuilt", folder)
    assert after == before > 0
    builder = kernels.start_building(config, execution.batching.name, execution.attention.name)
    assert builder.wait(BUILD_SECONDS) == 0
    assert kernels.marker(config, checkpoint).exists()
    before, after, compiled_steps = serve(checkpoint, "compiled", folder)
    assert compiled_steps > 20
    assert after == before > 0


@cpu_attention
@pytest.mark.parametrize(("memory_bytes", "dtype"), [(1 << 30, mx.float32), (1 << 10, mx.bfloat16)])
def test_kernels_are_built_for_the_weights_as_they_are_served(
    memory_bytes: int, dtype: mx.Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has taken most of the memory by then, on which the type of the weights depends."""
    checkpoint = write_family(SHALLOW, tmp_path, dtype=mx.bfloat16)
    computed = list[CachedModel]()
    monkeypatch.setattr(assembly, "compute_compiled", computed.append)
    config = EngineConfig(str(checkpoint), memory_bytes=memory_bytes)
    assembly.build_kernels(config, "joined rows", "gather")
    assert [set(model.layout.dtypes) for model in computed] == [{dtype}]


@cpu_attention
def test_kernels_are_built_with_the_memory_that_was_there_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = list[EngineConfig]()
    monkeypatch.setattr(assembly, "start_building", lambda config, *_: configs.append(config))
    monkeypatch.setattr(assembly, "compiler_problem", lambda: "")
    monkeypatch.setattr(DecodePath, "choose_after", lambda path, start, model: start())
    use_folder(tmp_path, monkeypatch)
    config = EngineConfig(str(write_family(SHALLOW, tmp_path)), kv_cache_bytes=1 << 24)
    opened = assembly.open_configured(config)
    assembly.assemble_opened(config, opened, load_blas(), lambda line: None)
    assert [one.memory_bytes for one in configs] == [opened.machine.left_bytes]


@cpu_attention
@pytest.mark.process
def test_kernels_are_built_by_one_process_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes to what another has built ends at once, and has built nothing."""
    use_folder(tmp_path, monkeypatch)
    config = EngineConfig("", memory_bytes=1 << 30)
    done = kernels.marker(config, DEFAULT_CHECKPOINT)
    done.parent.mkdir(parents=True)
    with (done.parent / "rootstock.lock").open("w") as lock:
        flock(lock, LOCK_EX)
        builder = kernels.start_building(config, "joined rows", "cascade")
        time.sleep(1.0)
        assert builder.poll() is None
        done.touch()
    assert builder.wait(BUILD_SECONDS) == 0
    assert not list(done.parent.glob("*.so"))
