"""Requests for models that are not loaded: they wait, and a stream gets keep-alives meanwhile."""

import logging
from collections.abc import Awaitable, Callable

from anyio import sleep
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from engine.api import EngineError
from server.dialects.delivery import STREAM_HEADERS
from server.dialects.errors import error_event
from server.errors import ApiError, ClientLeft
from server.generation.models import ServedModel
from server.record import request_record
from server.service import Service
from server.transport.sse import EVENT_STREAM, KEEP_ALIVE
from server.transport.waiting import client_waiting, task_scope

Begin = Callable[[ServedModel], Awaitable[Response]]
"""Makes the response when the model is there. Raises what there is to say to the client."""

KeepAlive = Callable[[], bytes]
"""Makes a part of a stream that clients pass over."""

log = logging.getLogger("rootstock.stream")


async def when_loaded(name: str, begin: Begin, http: Request, service: Service) -> Response:
    """The response of the model of that name, when it is loaded. A client that leaves before the
    response is made ends the wait for the model, the preparation and the generation.

    Raises ApiError, EngineStopped, ClientLeft and what `begin` raises.
    """
    record = request_record(http.scope)
    await service.chosen(name, record)
    async with client_waiting(http.receive):
        return await begin(await service.hold(name, record))


async def stream_when_loaded(
    name: str,
    begin: Begin,
    http: Request,
    service: Service,
    media_type: str = EVENT_STREAM,
    keep_alive: KeepAlive = lambda: KEEP_ALIVE,
) -> Response:
    """The response of the model of that name, for a client that reads a stream of `media_type`:
    what `keep_alive` makes is sent to it while the model is being loaded.
    """
    record = request_record(http.scope)
    own = await service.chosen(name, record)
    if not service.models.is_ready(own):
        return LoadingStream(name, begin, service, media_type, keep_alive)
    async with client_waiting(http.receive):
        return await begin(await service.hold(name, record))


class LoadingStream(Response):
    """The status line waits for the response, so that it may be an error's, but no longer than
    `keepalive_seconds`. After it, an error is an event, a missed deadline included.
    """

    def __init__(
        self,
        name: str,
        begin: Begin,
        service: Service,
        media_type: str,
        keep_alive: KeepAlive,
    ) -> None:
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers(STREAM_HEADERS)
        self._name = name
        self._begin = begin
        self._service = service
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        opening = _Opening(send, {"type": "http.response.start", "status": 200})
        opening.start["headers"] = self.raw_headers
        try:
            response = await self._response(scope, receive, opening)
            await response(scope, receive, opening.send)
        except ClientLeft:
            pass  # RequestLog has seen it leave
        except Exception as error:
            if not opening.is_sent:
                raise
            expected = isinstance(error, ApiError | EngineError)
            log.warning("request %s: %s", request_record(scope).id, error, exc_info=not expected)
            await opening.write(error_event(scope, error))
            await opening.end()

    async def _response(self, scope: Scope, receive: Receive, opening: "_Opening") -> Response:
        record = request_record(scope)
        with record.time_limit():  # that of TimeLimit ends with the first comment
            async with client_waiting(receive):
                async with task_scope() as tasks:
                    tasks.start_soon(self._comment, opening)
                    model = await self._service.hold(self._name, record)
                return await self._begin(model)

    async def _comment(self, opening: "_Opening") -> None:
        while True:
            await sleep(self._service.settings.keepalive_seconds)
            await opening.write(self._keep_alive())


class _Opening:
    """Sends a response whose beginning may have been sent before there was one."""

    def __init__(self, send: Send, start: Message) -> None:
        self._send = send
        self.start = start
        self.is_sent = False

    async def send(self, message: Message) -> None:
        """A message of the response itself."""
        if message["type"] != "http.response.start" or not self.is_sent:
            self.is_sent = True
            await self._send(message)

    async def write(self, data: bytes) -> None:
        """Before the response, or in its place."""
        await self.send(self.start)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
