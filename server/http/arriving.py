"""Request bodies as they arrive: limits on their bytes and their time."""

from collections.abc import Callable

from anyio import CancelScope, current_time
from starlette.datastructures import Headers
from starlette.types import Message, Receive

from server.budget import Reservation
from server.errors import ApiError, ClientDisconnected


class ArrivingBody:
    """One request's body, whose bytes are counted in a reservation as they come.

    `complete` is called when the last of them has come, and may raise.
    """

    def __init__(
        self,
        receive: Receive,
        reservation: Reservation,
        complete: Callable[[], None],
        max_bytes: int,
        timeout_seconds: float,
    ) -> None:
        self._receive = receive
        self._reservation = reservation
        self._complete = complete
        self._max_bytes = max_bytes
        self._timeout_seconds = timeout_seconds
        self._deadline = current_time() + timeout_seconds
        self._n_bytes = 0
        self._is_complete = False

    def check_head(self, headers: Headers) -> None:
        """Raises ApiError (413) for a body that says it is too large, and what `complete`
        raises where there is no body.
        """
        declared = headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise body_too_large(self._max_bytes)
        if declared == "0" and "transfer-encoding" not in headers:
            self._end()

    async def receive(self) -> Message:
        """The application's `receive`. Raises ApiError (408, 413, and that of a reservation that is
        evicted), and ClientDisconnected before all of it has come.
        """
        if self._is_complete:
            return await self._receive()
        with CancelScope(deadline=self._deadline) as limit:
            message = await self._receive()
        if limit.cancelled_caught:
            seconds = self._timeout_seconds
            late = f"The body did not arrive within {seconds:g} seconds."
            raise ApiError(408, late, code="body_timeout")
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        n_bytes = len(message.get("body", b""))
        self._n_bytes += n_bytes
        if self._n_bytes > self._max_bytes:
            raise body_too_large(self._max_bytes)
        self._reservation.add(n_bytes)
        if not message.get("more_body", False):
            self._end()
        return message

    def _end(self) -> None:
        self._complete()
        self._is_complete = True


def body_too_large(max_bytes: int) -> ApiError:
    """413: the body is larger than any may be."""
    message = f"The body is larger than {max_bytes} bytes."
    return ApiError(413, message, code="body_too_large")
