"""The server's end of the connection to an engine's process."""

import asyncio
import logging
import socket
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from engine.api import EngineStopped
from engine.child_process import ChildProcess, ending
from engine.remote import messages
from engine.remote.calls import Call
from engine.remote.messages import Cancel, Numbered, Said
from engine.sockets import RECEIVED_BYTES, FrameBuffer, ProtocolError, send_all
from engine.values.output import OutputEvent

SILENT_SECONDS = 20.0
"""A process that says nothing for so long, not even that it is alive, is ended: it has been stopped
from outside, or hangs where no other of its threads can run.
"""

FIRST_WORD_SECONDS = 120.0
"""The same before its first word: until then it imports, perhaps from a slow disk."""

END_SECONDS = 5.0
"""For a process that has nothing to do any more to be gone."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Receivers:
    """Called on the connection's own thread: what comes without having been asked for."""

    events: Callable[[list[OutputEvent]], None]
    report: Callable[[str], None]
    ended: Callable[[], None]  # no more events come; perhaps twice


class Connection:
    """Sends calls from any thread, and resolves their futures. The process ends with it."""

    def __init__(
        self, connection: socket.socket, process: ChildProcess, receivers: Receivers
    ) -> None:
        self._socket = connection
        self._process = process
        self._receivers = receivers
        self._socket.settimeout(FIRST_WORD_SECONDS)
        self._unsent: SimpleQueue[Numbered | Cancel | None] = SimpleQueue()
        self._pending: dict[int, tuple[Call, Future[Any]]] = {}
        self._n_calls = 0
        self._is_alive = True  # by its own words
        self._is_open = True
        self._ended: Future[str] = Future()
        self._ended.set_running_or_notify_cancel()
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read_all, name="engine-reader", daemon=True)
        self._writer = threading.Thread(target=self._write_all, name="engine-writer", daemon=True)
        self._reader.start()
        self._writer.start()

    def send(self, call: Call) -> tuple[int, Future[Any]]:
        """A number under which the call can be cancelled, and its result. Raises EngineStopped."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # so that a waiter cannot cancel it
        with self._lock:
            if not self._is_open:
                raise EngineStopped("the engine has stopped")
            self._n_calls += 1
            number = self._n_calls
            self._pending[number] = call, future
        self._unsent.put(Numbered(number, call))
        return number, future

    async def ask(self, call: Call) -> Any:
        """The result of a call. Raises EngineStopped, and what the call raises."""
        return await asyncio.wrap_future(self.send(call)[1])

    async def ended(self) -> str:
        """Returns when no more events come: why, in words."""
        return await asyncio.wrap_future(self._ended)

    def cancel(self, number: int) -> None:
        """Have the call ended, which is not answered then. Does nothing if it has been."""
        if self._pending.pop(number, None) is not None:
            self._unsent.put(Cancel(number))

    def close(self) -> None:
        """End the process, which has nothing to do any more. Returns when it is gone."""
        with suppress(OSError):  # it is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join()

    def kill(self) -> None:
        """End the process whatever it does. Returns when it is gone."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def is_alive(self) -> bool:
        """Whether the process answers, and says that its engine's thread turns."""
        return self._is_open and self._is_alive

    def _write_all(self) -> None:
        while (message := self._unsent.get()) is not None:
            try:
                frame = messages.to_process(message)
            except Exception as error:
                logger.exception("a call cannot be sent")
                self._fail(message.number, error)
                continue
            try:
                send_all(self._socket, frame)
            except TimeoutError:
                logger.error(
                    "an engine process that takes no calls for %g s is ended",
                    self._socket.gettimeout(),
                )
                self._process.kill()
                return
            except OSError:  # the process is gone, which the reader reports
                return

    def _read_all(self) -> None:
        frames = FrameBuffer()
        try:
            data = self._socket.recv(RECEIVED_BYTES)
            self._socket.settimeout(SILENT_SECONDS)
            while data:
                for body in frames.add(data):
                    self._take(body)
                data = self._socket.recv(RECEIVED_BYTES)
        except TimeoutError:
            seconds = self._socket.gettimeout()
            logger.error("an engine's process that is silent for %g s is ended", seconds)
            self._process.kill()
        except ConnectionError:
            logger.debug("the engine's process has ended in the midst of a frame")
        except Exception:
            logger.critical("what the engine's process says cannot be read", exc_info=True)
        finally:
            self._end()

    def _take(self, body: bytes) -> None:
        match body[0]:
            case Said.ALIVE:
                self._is_alive = messages.read_alive(body)
            case Said.ENDED:
                self._is_alive = False
                self._end_events("its engine has stopped")
            case Said.LINE:
                self._receivers.report(messages.read_line(body))
            case Said.EVENTS:
                self._receivers.events(messages.read_events(body))
            case Said.RETURNED:
                self._return(body)
            case Said.RAISED:
                raised = messages.read_raised(body)
                self._fail(raised.number, raised.exception())
            case said:
                raise ProtocolError(f"a frame of kind {said}")

    def _return(self, body: bytes) -> None:
        """Resolve the future of the call that a RETURNED frame answers. A result that cannot be
        read is that call's error: the frames around it are whole.
        """
        call, future = self._pending.pop(messages.read_number(body), (None, None))
        if call is None or future is None:
            return  # it has been cancelled
        try:
            result = messages.read_result(body, call)
        except Exception as error:
            logger.exception("the result of a call cannot be read: %s", call.call)
            future.set_exception(error)
        else:
            future.set_result(result)

    def _fail(self, number: int, error: Exception) -> None:
        """End the call with an error. Does nothing when it has been cancelled."""
        _, future = self._pending.pop(number, (None, None))
        if future is not None:
            future.set_exception(error)

    def _end_events(self, why: str) -> None:
        if not self._ended.done():
            self._ended.set_result(why)
        self._receivers.ended()

    def _end(self) -> None:
        with self._lock:
            self._is_open = False
            pending, self._pending = self._pending, {}
        for _, future in pending.values():
            future.set_exception(EngineStopped("the engine has stopped"))
        self._unsent.put(None)
        self._writer.join()
        self._socket.close()
        self._end_events(self._how_it_ended())

    def _how_it_ended(self) -> str:
        try:
            return f"its process has ended: {ending(self._process.wait(END_SECONDS))}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            return "its process has closed the connection"
