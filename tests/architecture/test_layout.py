"""What the layout promises and import-linter cannot see."""

import subprocess
import sys
from pathlib import Path

import pytest

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
    ("program", "absent"),
    [
        ("import kvstore.store, kvstore.invariants", "mlx mlx_lm"),
        (
            "import engine.core.scheduler, engine.core.loop",
            "mlx mlx_lm tokenizers transformers jinja2",
        ),
        ("import measuring.doctor, server.app", "mlx mlx_lm"),
        # MLX comes after the BLAS, and transformers takes a second, which a command would wait for.
        ("import engine.launch", "mlx transformers"),
        (
            "from server.terminal.cli import app; app(['--help'], standalone_mode=False)",
            "pydantic",
        ),
    ],
)
def test_what_need_not_be_imported_is_not(program: str, absent: str) -> None:
    """In a fresh interpreter, in which nothing else has imported it."""
    after = f"import sys; sys.exit(bool(set({absent.split()!r}) & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", f"{program}; {after}"], cwd=ROOT, check=True)


def test_the_scheduler_names_no_model_family() -> None:
    text = (ROOT / "engine/core/scheduler.py").read_text().lower()
    assert not [
        family for family in ("llama", "qwen", "mamba", "window", "recurrent") if family in text
    ]
