"""What the make targets install, and how they start the daemon."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.images.packages import INSTALL, PACKAGES

LARGE_PAGES = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
ROOT = Path(__file__).parents[2]
HAS_MKL = platform.system() == "Linux" and platform.machine() == "x86_64"
HAS_NVIDIA = Path("/dev/nvidiactl").exists()
BACKEND = "metal" if platform.system() == "Darwin" else "cpu"
NO_CARD = "BACKEND=" if BACKEND == "metal" else "BACKEND=cpu"
"""What tells make not to look for an NVIDIA card."""


def made(*arguments: str, **variables: str) -> str:
    """What `make` prints, without the variables of a `make test` around this."""
    inherited = ("MAKE", "GLIBC_TUNABLES", "HYPOTHESIS_PROFILE")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(inherited)}
    command = ["make", *arguments]
    environment = clean | variables
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout


def commands(environment: Path, target: str, *variables: str) -> str:
    """What `make` would run to set up a new environment."""
    return made("--dry-run", target, f"VENV={environment}", *variables)


def write_program(path: Path, script: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("target", ["serve", "test"])
def test_mkl_comes_where_it_is_the_fastest_and_can_be_left_out(tmp_path: Path, target: str) -> None:
    said = commands(tmp_path / "new", target)
    assert ("constraints.txt mkl" in said) == (HAS_MKL and not HAS_NVIDIA)
    assert ("1 GB on the disk" in said) == (HAS_MKL and not HAS_NVIDIA)
    said = commands(tmp_path / "new", target, "MKL=")
    assert "--constraint constraints.txt --editable" in said
    assert "constraints.txt mkl" not in said


@pytest.mark.parametrize(("target", "set_before"), [("serve", ""), ("chat", ""), ("serve", "mine")])
def test_the_daemon_is_started_with_large_pages(
    tmp_path: Path, target: str, set_before: str
) -> None:
    """Unless somebody has set something else. The service and the image do as make does."""
    write_program(tmp_path / "bin" / "rootstock", "/bin/sh\nenv")
    for name in ("bin/python", f".mlx-{BACKEND}", ".runtime"):  # else make sets it up
        (tmp_path / name).touch()
    before = {"GLIBC_TUNABLES": set_before} if set_before else {}
    said = made(target, f"VENV={tmp_path}", "MKL=", "PORT=0", NO_CARD, **before)
    assert (f"GLIBC_TUNABLES={set_before}" if set_before else LARGE_PAGES) in said.splitlines()
    assert LARGE_PAGES in (ROOT / "configs/rootstock.service").read_text("utf-8")
    assert LARGE_PAGES in (ROOT / "Dockerfile").read_text("utf-8")


def test_the_port_is_tried_before_anything_is_installed_and_not_afterwards(tmp_path: Path) -> None:
    said = commands(tmp_path, "serve")
    assert said.index("tools/free_port.py") < said.index("-m venv")
    for name in ("bin/python", f".mlx-{BACKEND}", ".runtime"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    said = commands(tmp_path, "serve", "MKL=", NO_CARD)
    assert "tools/free_port.py" not in said
    assert "rootstock serve" in said


def test_help_has_a_column_of_targets_and_one_of_descriptions(tmp_path: Path) -> None:
    """With the tools of macOS, too: `sed` writes a `t` there for a tab that is written `\\t`."""
    write_program(
        tmp_path / "sed",
        f"{sys.executable}\nimport os, sys\n"
        'words = [word.replace("\\\\t", "t") for word in sys.argv[1:]]\n'
        f'os.execv({shutil.which("sed")!r}, ["sed", *words])',
    )
    found = made("help", PATH=os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    rows = {line[:18].rstrip(): line[18:] for line in found.splitlines()}
    assert rows["help"] == "list the targets"
    assert rows["serve"].startswith("run the daemon; make serve PORT=9000, options in ARGS")


@pytest.mark.parametrize(
    ("target", "profile", "words"),
    [("test", "fast", "-m not slow and not browser"), ("test-all", "ci", "")],
)
def test_a_tier_has_its_tests_and_its_profile(
    tmp_path: Path, target: str, profile: str, words: str
) -> None:
    write_program(tmp_path / "bin" / "python", '/bin/sh\necho "$HYPOTHESIS_PROFILE: $*"')
    for name in (f".mlx-{BACKEND}", ".dev"):  # else make sets it up
        (tmp_path / name).touch()
    for chosen in ({}, {"HYPOTHESIS_PROFILE": "nightly"}):
        arguments = (f"VENV={tmp_path}", "MKL=", "ARGS=--last", NO_CARD)
        said = made("--silent", target, *arguments, **chosen)
        assert said.startswith(f"{chosen.get('HYPOTHESIS_PROFILE', profile)}: -m pytest")
        assert said.endswith(f"{words} --last\n")
        assert ("-m not slow" in said) == bool(words)


@pytest.mark.parametrize("target", ["serve", "test"])
def test_what_images_need_comes_without_what_it_names_in_turn(tmp_path: Path, target: str) -> None:
    said = commands(tmp_path / "new", target, NO_CARD)
    assert said.count("constraints.txt --no-deps mlx-vlm pillow") == 1
    assert (ROOT / "Dockerfile").read_text("utf-8").count("--no-deps mlx-vlm pillow") == 2
    pinned = (ROOT / "constraints.txt").read_text("utf-8").lower().splitlines()
    for name, version in PACKAGES.items():
        assert f"{name.lower()}=={version}" in pinned
    assert INSTALL in (ROOT / "docs/install.md").read_text("utf-8")


@pytest.mark.parametrize("backend", ["cpu", "cuda", "cuda12"])
def test_what_mlx_computes_with_is_installed_as_chosen(tmp_path: Path, backend: str) -> None:
    said = commands(tmp_path / "new", "serve", f"BACKEND={backend}")
    assert f'--editable ".[{backend}]"' in said
    assert f"MLX will compute with: {backend}" in said
    assert ("BACKEND=cpu" in said) == (backend != "cpu")
    assert ("constraints.txt mkl" in said) == (backend == "cpu" and HAS_MKL)
    assert f'--editable ".[dev,{backend}]"' in commands(
        tmp_path / "new", "test", f"BACKEND={backend}"
    )


def test_make_serve_takes_a_port_and_tries_it_first(tmp_path: Path) -> None:
    said = commands(tmp_path / "new", "serve", "PORT=9000", "ARGS=--model x").splitlines()
    assert said[0].endswith('tools/free_port.py "9000" --model x')
    assert said[-1].endswith("rootstock serve --port 9000 --model x")
