"""What a forge would run: on the Pythons that the package says it runs on, and not without end."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text("utf-8"))
JOBS: dict[str, Any] = WORKFLOW["jobs"]
PYTHON = "Programming Language :: Python :: "
TESTS = ("test", "test-all")


def commands(name: str) -> list[str]:
    """What a job runs in a shell."""
    return [step["run"] for step in JOBS[name]["steps"] if "run" in step]


def test_every_python_of_the_package_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    versions = {name.removeprefix(PYTHON) for name in project["classifiers"] if PYTHON in name}
    assert set(JOBS["test-all"]["strategy"]["matrix"]["python"]) == versions - {"3"}


def test_each_system_runs_the_fast_tests_on_every_push() -> None:
    every = set(JOBS["test-all"]["strategy"]["matrix"]["system"])
    assert {cell["system"] for cell in JOBS["test"]["strategy"]["matrix"]["include"]} == every
    assert "if" not in JOBS["test"]


def test_a_push_does_not_cancel_the_weekly_run() -> None:
    assert "github.event_name" in WORKFLOW["concurrency"]["group"]


def test_lint_runs_once() -> None:
    """It says the same on every system and Python."""
    assert [name for name in JOBS if any("make check" in line for line in commands(name))] == [
        "lint"
    ]
    assert "strategy" not in JOBS["lint"]


@pytest.mark.parametrize("name", TESTS)
def test_a_failed_run_leaves_its_results_and_durations(name: str) -> None:
    (command,) = [line for line in commands(name) if line.startswith(f"make {name} ")]
    assert "--durations=" in command
    assert "--junitxml=tests.xml" in command
    (upload,) = [step for step in JOBS[name]["steps"] if "upload-artifact" in step.get("uses", "")]
    assert (upload["if"], upload["with"]["path"]) == ("always()", "tests.xml")


def test_a_job_ends_and_keeps_no_credentials() -> None:
    for job in JOBS.values():
        (checkout,) = [step for step in job["steps"] if "checkout" in step.get("uses", "")]
        assert checkout["with"]["persist-credentials"] is False
        assert job["timeout-minutes"] <= 60


def test_no_push_installs_the_other_project_of_that_name() -> None:
    steps = [step for job in JOBS.values() for step in job["steps"]]
    (step,) = [step for step in steps if "install rootstock==" in step.get("run", "")]
    assert step["if"] == JOBS["test-all"]["if"]
    assert "schedule" in step["if"]
    assert "push" not in step["if"]
