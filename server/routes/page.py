"""`GET /`: the cache as a picture, with a chat beside it. Left out with `--no-dashboard`."""

from fastapi import Request
from starlette.responses import Response

from server.dialects.endpoint import Endpoints
from server.routes.dashboard import METHODS, files

router = Endpoints(include_in_schema=False)


@router.api_route("/", methods=METHODS)
async def page(request: Request) -> Response:
    return await files.get_response("index.html", request.scope)
