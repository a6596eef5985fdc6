"""Signals as SystemExit, so that contexts are left in order."""

import signal
import sys
import termios
from collections.abc import Iterator, Set
from contextlib import contextmanager
from types import FrameType

TERMINAL_ENDS = frozenset({signal.SIGTERM, signal.SIGHUP})


@contextmanager
def exiting_on(signals: Set[signal.Signals]) -> Iterator[None]:
    """Turn the signals into SystemExit, so that contexts end and the daemon with them.

    A signal that is ignored, as nohup does, stays so.
    """
    before = {number: signal.getsignal(number) for number in signals}
    heeded = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])


@contextmanager
def terminal_restored(terminal: int) -> Iterator[None]:
    """Put back the settings of the terminal with this descriptor when the block ends. A signal may
    come while a prompt is changing them, before the prompt knows what to undo.
    """
    before = termios.tcgetattr(terminal)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
