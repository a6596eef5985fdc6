"""What a forge would run: on the Pythons that the package says it runs on, and not without end."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
JOBS: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text("utf-8"))[
    "jobs"
]
PYTHON = "Programming Language :: Python :: "


def test_every_python_of_the_package_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    versions = {name.removeprefix(PYTHON) for name in project["classifiers"] if PYTHON in name}
    assert set(JOBS["test"]["strategy"]["matrix"]["python"]) == versions - {"3"}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_ends(name: str) -> None:
    assert JOBS[name]["timeout-minutes"] <= 60
