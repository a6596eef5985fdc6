"""`POST /v1/cache/warm`: compute a prompt before a client sends it."""

from server.dialects.endpoint import GENERATION_ERRORS, Endpoints
from server.errors import ApiError
from server.generation.warming import Warmed, WarmRequest, warm, warm_request
from server.http.stream import client_waiting
from server.service import Context

router = Endpoints()


@router.endpoint("POST", "/v1/cache/warm", errors=GENERATION_ERRORS)
async def warm_cache(body: WarmRequest, context: Context) -> Warmed:
    """Answers when the prompt is computed, which waits for all other requests. A disconnect ends
    it; computed tokens stay in the cache.
    """
    service, record = context.service, context.record
    if body.pin and not service.is_admin(record):
        message = "pin: this needs an admin's API key."
        raise ApiError(403, message, param="pin", code="admin_key_needed")
    async with client_waiting(context.http.receive):
        model = await context.model(body.model)
        request = await warm_request(body, model, record)
        record.end_preparation()
        with service.tracker.answering(record, [request]) as tracked:
            return await warm(request, model, tracked.note)
