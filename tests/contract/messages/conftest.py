import pytest

from tests.contract.messages.scripted import MessagesDaemon
from tests.contract.scripted import Daemon


@pytest.fixture
def hermes(hermes: Daemon) -> MessagesDaemon:
    """The shared daemon, asked for messages."""
    return MessagesDaemon(hermes.engine, hermes.url, hermes.clients)
