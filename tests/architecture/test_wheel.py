"""What somebody gets who installs the wheel, in an environment that has never seen the tree."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from server import __version__

pytestmark = [pytest.mark.process, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PARTS = ("server", "measuring", "engine", "kvstore", "configs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    subprocess.run([*build, "--directory", str(directory)], cwd=ROOT, check=True)
    (path,) = directory.iterdir()
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel in it, and this one's dependencies within its reach: the
    `.pth` file that leads from there to the tree is not read.
    """
    home = tmp_path_factory.mktemp("installed")
    venv.create(home, symlinks=True)  # a copied interpreter may not find its library on macOS
    (site_packages := site_packages_of(home)).joinpath("dependencies.pth").write_text(
        sysconfig.get_path("purelib")
    )
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install"]
    options = ["--quiet", "--no-index", "--no-deps", "--ignore-installed"]
    subprocess.run([*pip, *options, str(wheel)], check=True)
    assert site_packages.is_dir()
    return home


def site_packages_of(home: Path) -> Path:
    (path,) = home.glob("lib/python*/site-packages")
    return path


def run(home: Path, *command: str, text: str = "") -> "subprocess.CompletedProcess[str]":
    """A command of the environment, somewhere else than in the tree."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [home / "bin" / command[0], *command[1:]],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        cwd=home,
        env={**environment, "ROOTSTOCK_PORT": "0"},
    )


def test_site_packages_gets_one_name(installed: Path) -> None:
    names = {path.name for path in site_packages_of(installed).iterdir()}
    info = f"rootstock_serve-{__version__}.dist-info"
    assert names == {"rootstock_serve", info, "dependencies.pth"}


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    paths = [path for part in PARTS for path in (ROOT / part).rglob("*") if path.is_file()]
    names = {path.relative_to(ROOT) for path in paths if path.parent.name != "__pycache__"}
    carried = {Path(name) for name in ZipFile(wheel).namelist() if "dist-info/" not in name}
    launcher = {Path("rootstock_serve/__init__.py"), Path("rootstock_serve/__main__.py")}
    assert carried == {"rootstock_serve" / name for name in names} | launcher


def test_the_licence_goes_with_it(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        text = archive.read(f"rootstock_serve-{__version__}.dist-info/licenses/LICENSE").decode()
    assert text == (ROOT / "LICENSE").read_text("utf-8")
    assert "Copyright 2026 The Rootstock authors" in text


@pytest.mark.parametrize(
    "command", [["rootstock"], ["rootstock-serve"], ["python", "-m", "rootstock_serve"]]
)
def test_the_command_says_its_version(installed: Path, command: list[str]) -> None:
    result = run(installed, *command, "--version")
    assert (result.stdout, result.stderr) == (f"rootstock {__version__}\n", "")


def test_the_tree_is_out_of_reach_there_and_so_is_every_name_but_one(installed: Path) -> None:
    for name in ("server", "measuring", "engine", "kvstore"):
        assert "No module named" in run(installed, "python", "-c", f"import {name}").stderr


def test_it_answers_with_the_model_that_comes_with_it(installed: Path) -> None:
    """A chat with a daemon of its own: the launcher, a second process, the embedded model."""
    command = ["rootstock-serve", "chat", "--model", "rootstock-demo", "--temperature", "0"]
    result = run(installed, *command, text="What are you?\n")
    assert result.returncode == 0, result.stderr
    assert "rootstock-demo at http://127.0.0.1:" in result.stderr
    assert result.stdout.strip()
