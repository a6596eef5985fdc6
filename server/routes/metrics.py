"""`GET /metrics`, in Prometheus' text format."""

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import PlainTextResponse, Response

from server.dialects.endpoint import Endpoints
from server.service import ServiceDependency

router = Endpoints()


@router.endpoint("GET", "/metrics", errors=None, response_class=PlainTextResponse)
async def metrics(service: ServiceDependency) -> Response:
    await service.models.stats()
    text = service.metrics.render(service.models.known.values())
    return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)
