"""What holds for every test."""

import gc
import os
import sys
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.mlx_backend.blas import load_blas
from tests.polling import WAIT_SECONDS
from tests.profiles import load_profile
from tests.real_model import index, minilm, smollm2  # noqa: F401 - fixtures for every test

# As in the daemon, before anything imports MLX: on the BLAS of its wheels products take many times
# as long.
load_blas()

load_profile()


class PatientClient(httpx.Client):
    """A client whose requests time out after WAIT_SECONDS unless it has a `timeout`. httpx's own
    default is 5 s, which a busy machine needs for a short answer.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"timeout": WAIT_SECONDS, **options})


@pytest.fixture(scope="session", autouse=True)
def patient_clients() -> Iterator[None]:
    """Make WAIT_SECONDS the default time-out of `httpx.Client` and of httpx's functions, for which
    httpx has no setting.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(httpx, "Client", PatientClient)
        for name in ("delete", "get", "post", "put", "stream"):
            patched.setattr(httpx, name, partial(getattr(httpx, name), timeout=WAIT_SECONDS))
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait, for processes or for time to pass. Two on
    macOS, whose runners have little memory and one GPU. PYTEST_XDIST_AUTO_NUM_WORKERS decides
    otherwise.
    """
    if wanted := os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return int(wanted)
    return 2 if sys.platform == "darwin" else (os.cpu_count() or 1) + 1


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


@pytest.fixture(scope="session", autouse=True)
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands find no daemon of the machine's user, nor of another test process, and `rootstock`
    is on the PATH.
    """
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        environment.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        yield
