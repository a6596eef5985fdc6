"""`POST /v1/cache/warm`: compute a prompt before a client sends it."""

from server.dialects.endpoint import GENERATION_ERRORS, Endpoints
from server.errors import ApiError
from server.generation.warming import Warmed, WarmRequest, warm, warm_request
from server.service import Context

router = Endpoints()


@router.endpoint("POST", "/v1/cache/warm", body=WarmRequest, errors=GENERATION_ERRORS)
async def warm_cache(context: Context) -> Warmed:
    """Answers when the prompt is computed, which waits for all other requests. A disconnect ends
    it; computed tokens stay in the cache.
    """
    service, record = context.service, context.record
    is_admin = service.is_admin(record)

    def check(body: WarmRequest) -> None:
        if body.pin and not is_admin:
            message = "pin: this needs an admin's API key."
            raise ApiError(403, message, param="pin", code="admin_key_needed")

    async with context.prepared(WarmRequest, warm_request, check) as (model, request):
        with service.tracker.answering(record, [request]) as tracked:
            return await warm(request, model, tracked.note)
