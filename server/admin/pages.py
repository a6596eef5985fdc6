"""The web pages and the files that they load: all from this origin, as their policy demands."""

from os import PathLike, stat_result
from pathlib import Path
from typing import cast

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

import server
from server.dialects.endpoint import Endpoints

METHODS = ["GET", "HEAD"]

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # revalidates each time, mostly with a 304
}


class PageFiles(StaticFiles):
    """A folder's files, each with HEADERS."""

    def file_response(
        self,
        full_path: str | PathLike[str],
        stat_result: stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(HEADERS)
        return response


class LaunchableAgent(BaseModel):
    """An agent that `rootstock launch` can start, and its requirements of a model."""

    name: str
    context_tokens: int  # the shortest context in which a session works; 0 if that is not known
    calls_tools: bool


class Launch(BaseModel):
    """The command line of `rootstock` on the daemon's machine, and the agents that it can start."""

    command: str
    agents: list[LaunchableAgent]


NO_LAUNCH = Launch(command="rootstock", agents=[])

router = Endpoints(include_in_schema=False)
page_router = Endpoints(include_in_schema=False)
"""`GET /`. Left out with `--no-dashboard`."""

files = PageFiles(directory=Path(server.__file__).parent / "dashboard")


@router.api_route("/docs", methods=METHODS)
async def docs(request: Request) -> Response:
    """The API's description, for people: `/openapi.json` as a page."""
    return await files.get_response("docs/index.html", request.scope)


@router.api_route("/dashboard/agents", methods=METHODS)
async def launch(request: Request) -> Launch:
    """The facts of the page's `rootstock launch` lines, as the terminal knows them."""
    return cast(Launch, request.app.state.launch)


@router.api_route("/dashboard/{path:path}", methods=METHODS)
async def file(path: str, request: Request) -> Response:
    return await files.get_response(path, request.scope)


@page_router.api_route("/", methods=METHODS)
async def page(request: Request) -> Response:
    """The cache as a picture, with a chat next to it."""
    return await files.get_response("index.html", request.scope)
