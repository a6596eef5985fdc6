"""The server's end of the connection to an engine's process: calls out, results and events in."""

import asyncio
import logging
import select
import socket
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from engine.api import EngineStopped, Report
from engine.process.child import REPORTED_STATUS, ChildProcess, ending
from engine.process.sockets import RECEIVED_BYTES, FrameBuffer, ProtocolError, send_all
from engine.remote import wire
from engine.remote.wire import CANCEL, Call, CallMessage, Kind, P, R
from engine.values.output import OutputEvent

SILENT_SECONDS = 20.0
"""A process that sends nothing for this long, not even that it is alive, is killed: it has been
stopped from outside, or hangs where none of its threads can run.
"""

WAKE_SECONDS = 3.0
"""What such a process has left to send something. Where both processes were stopped, as by Ctrl-Z,
the time has passed for the engine's, too; it sends as soon as both run again.
"""

FIRST_FRAME_SECONDS = 120.0
"""How long a process may take to send its first frame: it imports, perhaps from a slow disk."""

END_SECONDS = 5.0
"""How long a process may take to end when nothing is left to do."""

logger = logging.getLogger(__name__)


class _PendingCalls:
    """The calls that wait for their answers. Three threads answer, cancel and fail them, so that
    each is taken once. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[int, tuple[Call[Any, Any], Future[Any]]] = {}
        self._n_calls = 0
        self.is_closed = False

    def add(self, call: Call[Any, Any], future: Future[Any]) -> int:
        """Returns the number of the call. Raises EngineStopped once it is closed."""
        with self._lock:
            if self.is_closed:
                raise EngineStopped("the engine has stopped")
            self._n_calls += 1
            self._calls[self._n_calls] = call, future
            return self._n_calls

    def take(self, number: int) -> tuple[Call[Any, Any], Future[Any]] | None:
        """Remove a call and return it; None if it has been taken before."""
        with self._lock:
            return self._calls.pop(number, None)

    def close(self) -> list[Future[Any]]:
        """Take all calls, and refuse later ones."""
        with self._lock:
            self.is_closed = True
            calls, self._calls = self._calls, {}
        return [future for _, future in calls.values()]


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
        self._socket.settimeout(FIRST_FRAME_SECONDS)
        self._unsent: SimpleQueue[tuple[int, Callable[[], CallMessage]] | None] = SimpleQueue()
        self._pending = _PendingCalls()
        self._is_alive = True  # as last reported by the process
        self._last_line = ""  # of its reports
        self._ended: Future[str] = Future()
        self._ended.set_running_or_notify_cancel()
        self._reader = threading.Thread(target=self._read_all, name="engine-reader", daemon=True)
        self._writer = threading.Thread(target=self._write_all, name="engine-writer", daemon=True)
        self._reader.start()
        self._writer.start()

    def send(
        self, call: Call[P, R], *arguments: P.args, **named: P.kwargs
    ) -> tuple[int, Future[R]]:
        """Returns the number with which the call can be cancelled, and the future of its result.
        Raises EngineStopped.
        """
        future: Future[R] = Future()
        future.set_running_or_notify_cancel()  # so that a waiter cannot cancel it
        number = self._pending.add(call, future)
        # The writer's thread makes the JSON: a prompt may be long.
        self._unsent.put(
            (number, lambda: CallMessage(number, call.name, call.json(*arguments, **named)))
        )
        return number, future

    async def call(self, call: Call[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """The result of a call. Raises EngineStopped and the call's own errors."""
        return await asyncio.wrap_future(self.send(call, *arguments, **named)[1])

    async def ended(self) -> str:
        """Returns when no more events come: why, in words."""
        return await asyncio.wrap_future(self._ended)

    def cancel(self, number: int) -> None:
        """Cancel a call, which is then not answered. Does nothing if it has been answered."""
        if self._pending.take(number) is not None:
            self._unsent.put((number, lambda: CallMessage(number, CANCEL)))

    def close(self) -> None:
        """End a process that has nothing left to do. Returns when it has ended."""
        with suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join()

    def kill(self) -> None:
        """Kill the process. Returns when it has ended."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def is_alive(self) -> bool:
        """Whether the process answers, and reports that its engine is alive."""
        return self._is_alive and not self._pending.is_closed

    def _write_all(self) -> None:
        try:
            self._write_calls()
        finally:  # the process ends when it has read all, and the reader with it
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def _write_calls(self) -> None:
        while (unsent := self._unsent.get()) is not None:
            number, message = unsent
            try:
                frame = message().frame()
            except Exception as error:
                logger.exception("a call cannot be sent")
                self._fail(number, error)
                continue
            try:
                send_all(self._socket, frame)
            except TimeoutError:
                logger.error(
                    "killing an engine's process that has taken no calls for %g s",
                    self._socket.gettimeout(),
                )
                self._process.kill()
                return
            except OSError:  # the process has ended, which the reader reports
                return

    def _read_all(self) -> None:
        frames = FrameBuffer()
        try:
            data = self._socket.recv(RECEIVED_BYTES)
            self._socket.settimeout(SILENT_SECONDS)
            while data:
                for body in frames.add(data):
                    self._take(body)
                data = self._receive()
        except TimeoutError:
            seconds = self._socket.gettimeout()
            logger.error("killing an engine's process that has sent nothing for %g s", seconds)
            self._process.kill()
        except ConnectionError:
            logger.debug("the engine's process has ended in the midst of a frame")
        except Exception:
            logger.critical("a frame of the engine's process cannot be read", exc_info=True)
        finally:
            self._end()

    def _receive(self) -> bytes:
        """The next bytes; none at the end. Raises TimeoutError if the process is silent."""
        try:
            return self._socket.recv(RECEIVED_BYTES)
        except TimeoutError:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(1000 * WAKE_SECONDS):
                raise
            return self._socket.recv(RECEIVED_BYTES)

    def _take(self, body: bytes) -> None:
        kind, number, json = wire.read_frame(body)
        match kind:
            case Kind.ALIVE:
                self._is_alive = wire.ALIVE.validate_json(json)
            case Kind.ENDED:
                self._is_alive = False
                self._end_events("its engine has stopped")
            case Kind.LINE:
                self._last_line = wire.LINE.validate_json(json)
                self._report(self._last_line)
            case Kind.EVENTS:
                self._deliver(wire.EVENTS.validate_json(json))
            case Kind.RETURNED:
                self._return(number, json)
            case Kind.RAISED:
                self._fail(number, wire.RAISED.validate_json(json).exception())
            case _:
                raise ProtocolError(f"a frame of kind {kind}")

    def _return(self, number: int, json: bytes) -> None:
        """Resolve the future of a call. A result that cannot be read fails that call only: the
        frames before and after it are whole.
        """
        if (pending := self._pending.take(number)) is None:
            return  # it has been cancelled
        call, future = pending
        try:
            result = call.result.validate_json(json)
        except Exception as error:
            logger.exception("the result of a call cannot be read: %s", call.name)
            future.set_exception(error)
        else:
            future.set_result(result)

    def _fail(self, number: int, error: Exception) -> None:
        """Resolve the future of a call with an error. Does nothing if it has been cancelled."""
        if (pending := self._pending.take(number)) is not None:
            pending[1].set_exception(error)

    def _end_events(self, why: str) -> None:
        if not self._ended.done():
            self._ended.set_result(why)
        self._when_ended()

    def _end(self) -> None:
        why = "its connection has ended"
        try:
            for future in self._pending.close():
                future.set_exception(EngineStopped("the engine has stopped"))
            with suppress(OSError):  # the writer may wait for the process to read
                self._socket.shutdown(socket.SHUT_RDWR)
            self._unsent.put(None)
            self._writer.join()
            self._socket.close()
            why = self._how_it_ended()
        finally:
            self._end_events(why)

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return "its process has closed the connection"
        if status == REPORTED_STATUS and self._last_line:
            return self._last_line
        return f"its process has ended: {ending(status)}"
