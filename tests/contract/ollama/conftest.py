import pytest

from tests.contract.ollama.scripted import OllamaDaemon
from tests.contract.scripted import Daemon


@pytest.fixture
def hermes(hermes: Daemon) -> OllamaDaemon:
    """The shared daemon, asked in Ollama's dialect."""
    return OllamaDaemon(hermes.engine, hermes.url, hermes.clients)
