"""`/admin/cache`: what the cache holds, what it would find, and a way to empty it."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from pydantic import BeforeValidator

from engine.types.cache import CacheTier
from server.generation.engine_requests import check_prompt
from server.generation.tokens import prompt_tokens
from server.openapi import errors, json_body
from server.schemas.cache import CacheStatsResponse, ClearResponse, ProbeResponse
from server.schemas.prompt import PromptOrChat
from server.service import JsonBody, RecordDependency, ServiceDependency

router = APIRouter(prefix="/admin/cache")

EVERY_TIER = tuple(CacheTier)


def _split(values: object) -> object:
    """`memory,disk` is both, as is `tiers=memory&tiers=disk`."""
    if not isinstance(values, list):
        return values
    return [part for value in values for part in str(value).split(",")]


ProbeBody = Annotated[PromptOrChat, Depends(JsonBody(PromptOrChat))]
NamespaceId = Annotated[
    str | None,
    Query(pattern="^[0-9a-f]{1,64}$", description="As `/admin/cache/tree` names it; without, all."),
]

Tiers = Annotated[
    tuple[CacheTier, ...],
    BeforeValidator(_split),
    Query(
        max_length=len(EVERY_TIER),
        description="With commas between them; without, all.",
        json_schema_extra={"maxItems": len(EVERY_TIER)},
    ),
]


@router.post("/clear", responses=errors(400, 503))
async def clear_cache(
    service: ServiceDependency, namespace: NamespaceId = None, tiers: Tiers = EVERY_TIER
) -> ClearResponse:
    """Blocks that live sequences hold stay with them; only their index is forgotten. What was freed
    is counted in memory alone.
    """
    cleared = await service.engine.clear_cache(namespace, tiers)
    return ClearResponse(blocks_freed=cleared.blocks, bytes_freed=cleared.bytes)


@router.head("/stats", include_in_schema=False)
@router.get("/stats", responses=errors(503))
async def cache_stats(service: ServiceDependency) -> CacheStatsResponse:
    """As of the running step; of an engine that has stopped, as it was then."""
    return CacheStatsResponse.of(service.engine.stats())


@router.post(
    "/probe", responses=errors(400, 404, 408, 413, 503), openapi_extra=json_body(PromptOrChat)
)
async def probe_cache(
    body: ProbeBody, service: ServiceDependency, record: RecordDependency
) -> ProbeResponse:
    """Of what the requests with the same API key would find, if keys share nothing."""
    model = service.resolve(body.model)
    prompt = await prompt_tokens(body, model, record)
    check_prompt(prompt, model.engine.card, "prompt" if body.prompt is not None else "messages")
    record.slot.release()
    probed = await model.engine.probe(prompt, record.cache_salt(body.cache_salt))
    return ProbeResponse(
        prompt_tokens=len(prompt),
        cached_tokens=probed.cached_tokens,
        block_digests=list(probed.block_digests),
    )
