"""The server's end of the connection to an engine's process."""

import asyncio
import logging
import socket
import subprocess
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar, TypeVarTuple

from engine.api import EngineStopped, Report
from engine.process.child import ChildProcess, ending
from engine.process.sockets import RECEIVED_BYTES, FrameBuffer, ProtocolError, send_all
from engine.remote import wire
from engine.remote.calls import CALLS, EngineCalls
from engine.remote.wire import CANCEL, Kind, Message
from engine.values.output import OutputEvent

SILENT_SECONDS = 20.0
"""A process that sends nothing for this long, not even that it is alive, is killed: it has been
stopped from outside, or hangs where no other of its threads can run.
"""

FIRST_WORD_SECONDS = 120.0
"""How long a process may take to send its first frame: it imports, perhaps from a slow disk."""

END_SECONDS = 5.0
"""How long a process with nothing left to do may take to end."""


logger = logging.getLogger(__name__)

Ts = TypeVarTuple("Ts")
R = TypeVar("R")
Call = Callable[[EngineCalls, *Ts], Coroutine[Any, Any, R]]
"""A method of EngineCalls, which gives a call its name and its types."""


class Connection:
    """Sends calls from any thread, and resolves their futures. The process ends with it."""

    def __init__(
        self,
        connection: socket.socket,
        process: ChildProcess,
        deliver: Callable[[list[OutputEvent]], None],
        report: Report,
        when_ended: Callable[[], None],
    ) -> None:
        """The three functions are called on the connection's own thread. No more events come after
        `when_ended`, which may be called twice.
        """
        self._socket = connection
        self._process = process
        self._deliver = deliver
        self._report = report
        self._when_ended = when_ended
        self._socket.settimeout(FIRST_WORD_SECONDS)
        self._unsent: SimpleQueue[Message | None] = SimpleQueue()
        self._pending: dict[int, tuple[str, Future[Any]]] = {}
        self._n_calls = 0
        self._is_alive = True  # as the process last said
        self._is_open = True
        self._ended: Future[str] = Future()
        self._ended.set_running_or_notify_cancel()
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read_all, name="engine-reader", daemon=True)
        self._writer = threading.Thread(target=self._write_all, name="engine-writer", daemon=True)
        self._reader.start()
        self._writer.start()

    def send(self, call: Call[*Ts, R], *arguments: *Ts) -> tuple[int, Future[R]]:
        """A number under which the call can be cancelled, and its result. Raises EngineStopped."""
        future: Future[R] = Future()
        future.set_running_or_notify_cancel()  # so that a waiter cannot cancel it
        with self._lock:
            if not self._is_open:
                raise EngineStopped("the engine has stopped")
            self._n_calls += 1
            number = self._n_calls
            self._pending[number] = call.__name__, future
        self._unsent.put(Message(number, call.__name__, arguments))
        return number, future

    async def call(self, call: Call[*Ts, R], *arguments: *Ts) -> R:
        """The result of a call. Raises EngineStopped, and what the call raises."""
        return await asyncio.wrap_future(self.send(call, *arguments)[1])

    async def ended(self) -> str:
        """Returns when no more events come: why, in words."""
        return await asyncio.wrap_future(self._ended)

    def cancel(self, number: int) -> None:
        """End a call, which is not answered then. Does nothing if it has been answered."""
        if self._pending.pop(number, None) is not None:
            self._unsent.put(Message(number, CANCEL))

    def close(self) -> None:
        """End a process that has nothing left to do. Returns when it is gone."""
        with suppress(OSError):  # it is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join()

    def kill(self) -> None:
        """Kill the process. Returns when it is gone."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def is_alive(self) -> bool:
        """Whether the process answers, and says that its engine's thread turns."""
        return self._is_open and self._is_alive

    def _write_all(self) -> None:
        while (message := self._unsent.get()) is not None:
            try:
                frame = message.frame()
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
        kind, number, json = wire.read_frame(body)
        match kind:
            case Kind.ALIVE:
                self._is_alive = wire.ALIVE.validate_json(json)
            case Kind.ENDED:
                self._is_alive = False
                self._end_events("its engine has stopped")
            case Kind.LINE:
                self._report(wire.LINE.validate_json(json))
            case Kind.EVENTS:
                self._deliver(wire.EVENTS.validate_json(json))
            case Kind.RETURNED:
                self._return(number, json)
            case Kind.RAISED:
                self._fail(number, wire.RAISED.validate_json(json).exception())
            case _:
                raise ProtocolError(f"a frame of kind {kind}")

    def _return(self, number: int, json: bytes) -> None:
        """Resolve the future of a call. A result that cannot be read is that call's error: the
        frames around it are whole.
        """
        name, future = self._pending.pop(number, (None, None))
        if name is None or future is None:
            return  # it has been cancelled
        try:
            result = CALLS[name].result.validate_json(json)
        except Exception as error:
            logger.exception("the result of a call cannot be read: %s", name)
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
        self._when_ended()

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
