"""`/admin/cache/tree` and `/admin/cache/nodes`. Left out with `--no-dashboard`."""

from contextlib import suppress
from typing import Annotated

from anyio import to_thread
from fastapi import Path
from starlette.responses import Response

from engine.api import EngineStopped
from server.dialects.delivery import json_response
from server.dialects.endpoint import Endpoints, unnamed_events
from server.errors import ApiError
from server.http.stream import EVENT_STREAM, DeferredStream
from server.schemas.cache_tree import CacheTree, NodeText
from server.service import LoadedDependency, RecordDependency, ServiceDependency

router = Endpoints(prefix="/admin/cache")

TEXT_TOKENS = 4096
"""How much of a node is shown as text."""


class EventStream(Response):
    media_type = EVENT_STREAM


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
async def cache_tree_stream(
    loaded: LoadedDependency, service: ServiceDependency, record: RecordDependency
) -> Response:
    """The cache as it is now and whenever it has changed, once a second at most.

    A slow reader gets the latest, and not all of them.
    """
    record.never_ends()
    feed = loaded.feed

    async def fill(stream: DeferredStream) -> None:
        async with service.watch.watching(feed):
            frame = await feed.fresh()
            with suppress(EngineStopped):  # there is nothing more to see
                while True:
                    await stream.write(frame.event)
                    frame = await feed.next_after(frame.version)

    return DeferredStream(EVENT_STREAM, fill, service.settings.keepalive_seconds)


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
