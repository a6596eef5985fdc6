"""How much the tests try, and on how many workers."""

import pytest

from tests import conftest, profiles


@pytest.mark.parametrize(
    ("profile", "n", "share"),
    [("fast", 200, 40), ("fast", 25, 20), ("fast", 2, 2), ("ci", 40, 40), ("nightly", 5, 50)],
)
def test_a_profile_scales_the_examples(
    monkeypatch: pytest.MonkeyPatch, profile: str, n: int, share: int
) -> None:
    monkeypatch.setattr(profiles, "PROFILE", profile)
    assert profiles.examples(n) == share


@pytest.mark.parametrize(
    ("variable", "system", "cores", "workers"),
    [("", "linux", 2, 3), ("", "darwin", 8, 2), ("5", "linux", 2, 5), ("5", "darwin", 8, 5)],
)
def test_the_variable_decides_on_workers_and_macos_has_two(
    monkeypatch: pytest.MonkeyPatch, variable: str, system: str, cores: int, workers: int
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", variable)
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert conftest.pytest_xdist_auto_num_workers() == workers
