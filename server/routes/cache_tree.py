"""`/admin/cache/tree` and `/admin/cache/nodes`. Left out with `--no-dashboard`."""

from contextlib import suppress
from typing import Annotated

from anyio import move_on_after, to_thread
from fastapi import Path
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from engine.api import EngineStopped
from server.cache_feed import CacheFeed, Frame
from server.dialects.delivery import STREAM_HEADERS, json_response
from server.dialects.endpoint import Endpoints, unnamed_events
from server.errors import ApiError, ClientLeft
from server.http.sse import KEEP_ALIVE
from server.http.waiting import client_waiting
from server.schemas.cache_tree import CacheTree, NodeText
from server.service import LoadedDependency, ServiceDependency
from server.watch import Watch

router = Endpoints(prefix="/admin/cache")

TEXT_TOKENS = 4096
"""How much of a node is shown as text."""


class EventStream(Response):
    media_type = "text/event-stream"


NodeId = Annotated[int, Path(ge=0, le=2**63 - 1)]


@router.endpoint("GET", "/tree", answer=CacheTree, errors=(400, 404, 409))
async def cache_tree(loaded: LoadedDependency, service: ServiceDependency) -> Response:
    """The cache as it is now. Bounded, however large that is; made four times a second at most."""
    async with service.watch.watching(loaded.feed):
        return json_response((await loaded.feed.fresh()).body)


@router.endpoint(
    "GET",
    "/tree/stream",
    stream=unnamed_events(CacheTree),
    errors=(400, 404, 409),
    response_class=EventStream,
)
async def cache_tree_stream(loaded: LoadedDependency, service: ServiceDependency) -> Response:
    """The cache as it is now and whenever it has changed, once a second at most.

    A slow reader gets the latest, and not all of them.
    """
    return CacheTreeStream(loaded.feed, service.watch, service.settings.keepalive_seconds)


@router.endpoint("GET", "/nodes/{id}", errors=(400, 404, 409))
async def cache_node(id: NodeId, loaded: LoadedDependency, service: ServiceDependency) -> NodeText:
    """A node of the tree. Its text is shown only with `--dashboard-text`."""
    shows_text = service.settings.dashboard_text
    node = await loaded.feed.node(id, TEXT_TOKENS if shows_text else 0)
    if node is None:
        raise ApiError(404, f"There is no node {id} in the cache (any more).", code="no_such_node")
    text = None
    if shows_text:
        text = await to_thread.run_sync(loaded.engine.tokenizer.decode, node.token_ids)
    return NodeText(id=id, tokens=node.tokens, text=text)


class CacheTreeStream(EventStream):
    """The status line waits for the first snapshot, so that a refusal has a status of its own."""

    def __init__(self, feed: CacheFeed, watch: Watch, keepalive_seconds: float) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(STREAM_HEADERS)
        self._feed = feed
        self._watch = watch
        self._keepalive_seconds = keepalive_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with client_waiting(receive), self._watch.watching(self._feed):
                await self._stream(send)
        except ClientLeft:
            pass  # RequestLog has seen it leave

    async def _stream(self, send: Send) -> None:
        frame: Frame | None = await self._feed.fresh()
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        version = 0
        with suppress(EngineStopped):  # there is nothing more to see
            while True:
                if frame is not None:
                    version = frame.version
                await send(_part(frame.event if frame else KEEP_ALIVE))
                frame = await self._next_after(version)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next_after(self, version: int) -> Frame | None:
        """None after a silence."""
        with move_on_after(self._keepalive_seconds):
            return await self._feed.next_after(version)
        return None


def _part(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}
