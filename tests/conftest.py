"""What holds for every test."""

import gc
import os
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from engine.mlx_backend.cpu.blas import load_blas

# As in the daemon, before anything imports MLX: on the BLAS of its wheels products take many times
# as long.
load_blas()

# A busy machine is no failure. A failure prints what brings it back.
settings.register_profile("rootstock", deadline=None, print_blob=True)
settings.load_profile("rootstock")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait, for processes or for time to pass."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Have the garbage collector pass over all that is imported, as the daemon has: it stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def no_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is asked over TLS, and reading those that a machine trusts is nearly all the time
    that a client takes to be made.
    """
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("SSL_CERT_FILE", raising=False)
        environment.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("authorities")))
        yield
