"""`POST /v1/cache/warm`: compute a prompt before a client sends it."""

from typing import ClassVar

from pydantic import Field, ValidationError

from engine.values.request import Request
from server.dialects.endpoint import GENERATION_ERRORS, Endpoints
from server.dialects.openai import MessagesOrPrompt, messages_or
from server.errors import ApiError, invalid_field
from server.generation.requests import ServedModel
from server.generation.warming import Warmed, WarmPrompt, warm, warm_request
from server.record import RequestRecord
from server.service import Context


class WarmRequest(MessagesOrPrompt):
    """The beginning of chats, or of text completions."""

    EXAMPLE: ClassVar = {"messages": [{"role": "system", "content": "You are a careful reviewer."}]}

    model_config = messages_or({"type": "string"})

    prompt: str | None = Field(None, min_length=1, description="Of text completions.")
    pin: bool = Field(
        False, description="Keep it from eviction until the cache is cleared: for admins."
    )

    def value(self) -> WarmPrompt:
        """The prompt that is computed."""
        beginning = self.conversation if self.prompt is None else self.prompt
        return WarmPrompt(beginning, self.cache_salt, self.pin)


def read_warm_prompt(text: str) -> WarmPrompt:
    """A prompt of a file, as the JSON of a WarmRequest. Raises ApiError (400)."""
    try:
        return WarmRequest.model_validate_json(text).value()
    except ValidationError as error:
        raise invalid_field(error) from None


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

    async with context.prepared(WarmRequest, _request, check) as (model, request):
        with service.tracker.answering(record, [request]) as tracked:
            return await warm(request, model, tracked.note)


def _request(body: WarmRequest, model: ServedModel, record: RequestRecord) -> Request:
    return warm_request(body.value(), model, record)
