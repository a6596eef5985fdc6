"""The answers of `/render`: the engine's requests, as vLLM names their fields."""

from collections.abc import Sequence
from typing import TypeVar

from pydantic import BaseModel, RootModel
from starlette.responses import Response

from engine.values.request import Request
from server.dialects.job import json_response
from server.generation.request_fields import GenerationRequest
from server.record import output_of
from server.service import Prepare, RequestContext

BodyT = TypeVar("BodyT", bound=BaseModel)


class RenderedSampling(BaseModel):
    """The sampling values in use, under vLLM's names; omitted ones have the defaults of model and
    server.
    """

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


_SAME = (
    *("min_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Fields of a RenderedSampling that SamplingParams has under the same name."""


class RenderedRequest(BaseModel):
    """The request that the engine would get."""

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: RenderedSampling
    stream: bool
    cache_salt: str | None
    priority: int


class RenderedRequests(RootModel[list[RenderedRequest]]):
    """The rendered requests, one for each prompt."""


async def rendered_response(
    context: RequestContext,
    body: type[BodyT],
    render: Prepare[BodyT, tuple[Sequence[Request], bytes]],
) -> Response:
    """The response of a /render, which `render` makes with the engine's requests. Raises the
    engine's errors for these. Only requests with a grammar wait, for its trial.
    """
    async with context.prepared(body, render) as (model, (requests, json)):
        output_of(context.record).add(len(json))
        for request in requests:
            await model.engine.check(request)
        return json_response(json)


def rendered_request(request: Request, body: GenerationRequest, model: str) -> RenderedRequest:
    sampling, allowed = request.sampling, request.sampling.allowed_token_ids
    return RenderedRequest(
        request_id=request.id,
        model=model,
        token_ids=list(request.prompt),
        sampling_params=RenderedSampling(
            n=request.n,
            max_tokens=request.max_tokens,
            **{name: getattr(sampling, name) for name in _SAME},
            logit_bias={str(token): bias for token, bias in sampling.logit_bias.items()},
            allowed_token_ids=None if allowed is None else sorted(allowed),
            bad_words=body.bad_words,
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
