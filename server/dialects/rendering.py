"""The engine request that a body becomes, in vLLM's shape, for `/render` routes."""

from collections.abc import Sequence

from pydantic import BaseModel, RootModel

from engine.values.request import Request
from server.generation.models import ServedModel
from server.generation.request_fields import GenerationRequest
from server.record import RequestRecord


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
    allowed_token_ids: list[int] | None
    bad_words: list[str]
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


async def check_requests(
    requests: Sequence[Request], model: ServedModel, record: RequestRecord
) -> None:
    """Raises what the engine would. A grammar may wait for its trial: no other request does."""
    record.slot.release()
    for request in requests:
        await model.engine.check(request)


def rendered_request(request: Request, body: GenerationRequest, model: str) -> RenderedRequest:
    sampling, allowed = request.sampling, request.sampling.allowed_token_ids
    return RenderedRequest(
        request_id=request.id,
        model=model,
        token_ids=list(request.prompt),
        sampling_params=RenderedSampling(
            n=request.n,
            max_tokens=request.max_tokens,
            min_tokens=sampling.min_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias={str(token): bias for token, bias in sampling.logit_bias.items()},
            allowed_token_ids=None if allowed is None else sorted(allowed),
            bad_words=body.bad_words,
            seed=sampling.seed,
            stop=list(request.stop),
            stop_token_ids=sorted(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            logprobs=sampling.top_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            skip_special_tokens=request.skip_special_tokens,
        ),
        stream=body.stream,
        cache_salt=body.cache_salt or None,
        priority=request.priority,
    )
