"""`POST /tokenize`, `/detokenize`, `GET /tokenizer_info`."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from engine.launch import Checkpoint, open_checkpoint
from server.dialects.logprobs import token_text
from server.generation.engine_requests import check_token_ids
from server.generation.models import ServedModel
from server.generation.tokens import prompt_tokens
from server.openapi import errors, json_body
from server.routes.delivery import respond_without_engine
from server.schemas.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from server.service import JsonBody, ModelName, RecordDependency, ServiceDependency
from server.transport.unsent import CHARACTER_BYTES, TOKEN_BYTES, TOKEN_TEXT_BYTES

router = APIRouter()

TokenizeBody = Annotated[TokenizeRequest, Depends(JsonBody(TokenizeRequest))]
DetokenizeBody = Annotated[DetokenizeRequest, Depends(JsonBody(DetokenizeRequest))]


@router.post(
    "/tokenize",
    response_model=TokenizeResponse,
    responses=errors(400, 403, 404, 408, 413, 503),
    openapi_extra=json_body(TokenizeRequest),
)
async def tokenize(
    body: TokenizeBody, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    model = await service.model(body.model, record)
    with_special = body.add_special_tokens is not False
    tokens = await prompt_tokens(body, model, record, add_special_tokens=with_special)
    token_bytes = TOKEN_BYTES + (TOKEN_TEXT_BYTES if body.return_token_strs else 0)
    return await respond_without_engine(
        lambda: _tokenized(body, model, tokens), token_bytes * len(tokens), http, service
    )


@router.post(
    "/detokenize",
    response_model=DetokenizeResponse,
    responses=errors(400, 403, 404, 408, 413, 503),
    openapi_extra=json_body(DetokenizeRequest),
)
async def detokenize(
    body: DetokenizeBody, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    model = await service.model(body.model, record)
    text = await model.prompts.decode(record, body.tokens, "tokens")
    return await respond_without_engine(
        lambda: DetokenizeResponse(prompt=text), CHARACTER_BYTES * len(text), http, service
    )


@router.head("/tokenizer_info", include_in_schema=False)
@router.get("/tokenizer_info", responses=errors(400, 403, 404, 503))
async def tokenizer_info(
    service: ServiceDependency, record: RecordDependency, model: ModelName = ""
) -> TokenizerInfo:
    """What a client needs that renders chats itself, as lm-eval does, under vLLM's names."""
    own = await service.chosen(model, record)
    await service.hold(model, record)
    source = service.models.known[own].settings.source
    return await service.workers.run(record.client, 0, lambda: _info(open_checkpoint(source)))


def _info(checkpoint: Checkpoint) -> TokenizerInfo:
    tokens = checkpoint.special_tokens
    return TokenizerInfo(
        tokenizer_class=checkpoint.tokenizer_class,
        chat_template=checkpoint.chat_template or None,
        bos_token=tokens.get("bos_token"),
        eos_token=tokens.get("eos_token"),
        pad_token=tokens.get("pad_token"),
        unk_token=tokens.get("unk_token"),
    )


def _tokenized(
    body: TokenizeRequest, model: ServedModel, tokens: Sequence[int]
) -> TokenizeResponse:
    card, tokenizer = model.engine.card, model.engine.tokenizer
    check_token_ids(tokens, card, "prompt")
    texts = None
    if body.return_token_strs:
        texts = [token_text(tokenizer.token_bytes(token)) for token in tokens]
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=card.max_sequence_tokens,
        tokens=list(tokens),
        token_strs=texts,
    )
