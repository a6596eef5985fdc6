"""What a signal leaves of the terminal."""

import os
import termios
from collections.abc import Iterator

import pytest

from server.terminal.console import terminal_restored


@pytest.fixture
def terminal() -> Iterator[int]:
    screen, terminal = os.openpty()
    yield terminal
    os.close(screen)
    os.close(terminal)


def ended_by_a_signal(terminal: int) -> None:
    """As where SystemExit comes before the prompt has noted what it changes."""
    with terminal_restored(terminal):
        changed = termios.tcgetattr(terminal)
        changed[3] &= ~termios.ECHO
        termios.tcsetattr(terminal, termios.TCSANOW, changed)
        raise SystemExit(143)


def test_a_terminal_that_a_signal_finds_half_changed_is_put_back(terminal: int) -> None:
    with pytest.raises(SystemExit):
        ended_by_a_signal(terminal)
    assert termios.tcgetattr(terminal)[3] & termios.ECHO
