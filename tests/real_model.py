"""A real model for tests: SmolLM2-135M-Instruct, as `rootstock pull smollm2` has it."""

from pathlib import Path

import pytest

from engine.api import ModelError
from engine.mlx_backend.loading.locate import find_checkpoint


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The checkpoint in the user's cache folder, fetched if it is not there. Skips the test, with
    the reason, where it cannot be had.
    """
    try:
        return find_checkpoint("smollm2", download=True)
    except ModelError as error:
        pytest.skip(f"smollm2: {error}")
