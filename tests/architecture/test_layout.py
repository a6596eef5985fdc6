"""What the layout promises and import-linter cannot see."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.disk_cache.cache import DiskCache

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvstore", "engine", "measuring", "server")
MOST_LINES = {
    "engine/core/scheduler.py": 430,
}
MOST_LINES_ELSEWHERE = 500


def test_files_stay_small() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines())
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert len(lengths) > 100
    too_long = {
        name: n_lines
        for name, n_lines in lengths.items()
        if n_lines > MOST_LINES.get(name, MOST_LINES_ELSEWHERE)
    }
    assert too_long == {}


@pytest.mark.parametrize(
    "module",
    [
        "kvstore.store",
        "kvstore.invariants",
        "engine.core.scheduler",
        "engine.core.thread",
        "measuring.doctor",
        "server.app",
    ],
)
def test_it_runs_without_mlx(module: str) -> None:
    """In a fresh interpreter, in which nothing else has imported it."""
    program = f"import sys, {module}; sys.exit('mlx' in sys.modules or 'mlx_lm' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_help_waits_for_no_import_of_a_command() -> None:
    program = (
        "import sys; from server.terminal.cli import app; app(['--help'], standalone_mode=False)"
    )
    after = "sys.exit('pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", f"{program}; {after}"], cwd=ROOT, check=True)


def test_loading_the_launcher_imports_neither_mlx_nor_transformers() -> None:
    """MLX comes after the BLAS, and transformers takes a second, which a command would wait for."""
    program = "import sys, engine.launch; sys.exit(bool({'mlx', 'transformers'} & {*sys.modules}))"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_the_scheduler_names_no_model_family() -> None:
    text = (ROOT / "engine/core/scheduler.py").read_text().lower()
    assert not [
        family for family in ("llama", "qwen", "mamba", "window", "recurrent") if family in text
    ]


@pytest.mark.parametrize(
    ("nothing", "real"),
    [(DiskCache, DiskCache)],
)
def test_what_does_nothing_has_no_method_that_the_real_one_lacks(nothing: type, real: type) -> None:
    """A base class that does nothing would hide an override that was forgotten, or misspelt."""
    public = [name for name in vars(nothing) if not name.startswith("_")]
    assert public
    assert [name for name in public if name not in vars(real)] == []
