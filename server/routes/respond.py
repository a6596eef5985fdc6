"""Models as response bodies."""

from collections.abc import Callable

from anyio import to_thread
from pydantic import BaseModel
from starlette.responses import Response


async def rendered(render: Callable[[], BaseModel]) -> Response:
    """The body that `render` makes, made off the event loop: a big one would stall all streams."""
    return await to_thread.run_sync(lambda: json_response(render()))


def json_response(body: BaseModel) -> Response:
    """The body as it is: it was built from typed values, so nothing validates it again.

    Keys that were not set are left out; nulls that were set are sent.
    """
    return Response(body.model_dump_json(exclude_unset=True), media_type="application/json")
