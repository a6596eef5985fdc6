"""`POST /v1/chat/completions/render` and `/v1/completions/render`, in vLLM's shapes."""

from pydantic import BaseModel, RootModel


class RenderedSampling(BaseModel):
    """vLLM's names. What the request leaves open is as the model and the server have it."""

    n: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[str, float]
    seed: int | None
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    skip_special_tokens: bool


class RenderedRequest(BaseModel):
    """What the engine would be asked."""

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: RenderedSampling
    stream: bool
    cache_salt: str | None
    priority: int


class RenderedRequests(RootModel[list[RenderedRequest]]):
    """One for each prompt."""
