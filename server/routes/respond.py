"""Models as response bodies."""

from pydantic import BaseModel
from starlette.responses import Response


def json_response(body: BaseModel) -> Response:
    """The body as it is: it was built from typed values, so nothing validates it again."""
    return Response(body.model_dump_json(), media_type="application/json")
