"""A process that measures, and the connection to it."""

import subprocess
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol

from engine.measuring.messages import TASK, Task
from engine.process.child import ending, start_child


class Answers(Protocol):
    """What comes back of a task."""

    def next(self, seconds: float) -> bytes | None:
        """The next answer, or None where it does not come within so many seconds.

        Raises EOFError when there are no more.
        """
        ...

    def how_it_ended(self) -> str:
        """When there are no more; "" where all is well."""
        ...

    def kill(self) -> None:
        """End it, whatever it does, if it has not ended."""
        ...


Start = Callable[[Task], Answers]

_LAST_WORDS_SECONDS = 10.0


class MeasuringProcess:
    """Implements `Answers`, of one `engine.measuring.worker`."""

    def __init__(self, task: Task) -> None:
        """Raises OSError where no process can be started."""
        # A library that crashes says so at length.
        ours, self._process = start_child(
            "engine.measuring.worker", errors=subprocess.DEVNULL, variables=task.variables
        )
        self._connection = Connection(ours.detach())
        self._connection.send_bytes(TASK.dump_json(task))

    def next(self, seconds: float) -> bytes | None:
        try:
            return self._connection.recv_bytes() if self._connection.poll(seconds) else None
        except ConnectionError as error:
            raise EOFError from error

    def how_it_ended(self) -> str:
        try:
            code = self._process.wait(_LAST_WORDS_SECONDS)
        except subprocess.TimeoutExpired:
            return "its process fell silent"
        return f"its process ended: {ending(code)}" if code else ""

    def kill(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()
