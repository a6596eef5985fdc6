"""`GET /admin/requests`."""

from pydantic import BaseModel, ConfigDict


class LiveRequest(BaseModel):
    """One live sequence."""

    model_config = ConfigDict(from_attributes=True)

    request_id: str
    index: int
    status: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    blocks: int
    age_seconds: float


class LiveRequests(BaseModel):
    requests: list[LiveRequest]
