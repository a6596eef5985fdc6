"""`/admin/cache`: contents of the cache, a probe of a prompt, and clearing."""

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import suppress
from enum import StrEnum
from itertools import groupby
from typing import Annotated

from anyio import to_thread
from fastapi import Path, Query
from pydantic import BaseModel, BeforeValidator, Field
from starlette.responses import Response

from engine.api import EngineStopped, ModelError
from engine.launch import clear_unloaded
from engine.values.model import Tokenizer
from engine.values.settings import DiskCacheConfig
from engine.values.stats import ALL_TIERS, CacheTier, Cleared
from engine.values.tokens import pack
from engine.values.tree import IMAGE, NodeTokens
from server.admin.watch import EventStream, Watch, WatchDependency, event_stream
from server.admin_schema import (
    CacheStatsResponse,
    CacheTree,
    ClearedModel,
    ClearResponse,
    ProbeResponse,
    Remembered,
)
from server.dialects.endpoint import MODEL_ERRORS, Endpoints, unnamed_events
from server.dialects.job import json_response
from server.dialects.responses.store import StoreDependency
from server.dialects.tokens import PromptOrChat, prompt_tokens
from server.errors import ApiError, InvalidField, not_loaded
from server.generation.prompt import ChatPrompt, check_prompt
from server.generation.requests import ServedModel
from server.models.model import LoadedModel, Model
from server.record import RequestRecord
from server.service import (
    Context,
    LoadedDependency,
    ModelName,
    ServiceDependency,
)

router = Endpoints(prefix="/admin/cache")
tree_router = Endpoints(prefix="/admin/cache")
"""Left out with `--no-dashboard`."""

TEXT_TOKENS = 4096
"""How much of a node is shown as text."""

BEGINNING_TOKENS = 24
MOST_BEGINNINGS = 32
"""Nodes of one request."""


class Clearable(StrEnum):
    """The kinds of data that can be cleared."""

    KV = "kv"
    REPLAYS = "replays"
    RESPONSES = "responses"


def _split(values: object) -> object:
    """`memory,disk` is both, as is `tiers=memory&tiers=disk`."""
    if not isinstance(values, list):
        return values
    return [part for value in values for part in str(value).split(",")]


NamespaceId = Annotated[
    str | None,
    Query(pattern="^[0-9a-f]{1,64}$", description="As `/admin/cache/tree` names it; without, all."),
]

Tiers = Annotated[
    tuple[CacheTier, ...] | None,
    BeforeValidator(_split),
    Query(
        max_length=len(CacheTier),
        description="With commas between them; without, all.",
        json_schema_extra={"maxItems": len(CacheTier)},
    ),
]


What = Annotated[
    tuple[Clearable, ...],
    BeforeValidator(_split),
    Query(
        max_length=len(Clearable),
        description="With commas between them. `kv` is what prompts share; `replays` are answers "
        "with tool calls, remembered as tokens; `responses` those that `/v1/responses` has stored.",
        json_schema_extra={"maxItems": len(Clearable)},
    ),
]


@router.endpoint("POST", "/clear", errors=(400, 404, 409))
async def clear_cache(
    service: ServiceDependency,
    responses: StoreDependency,
    model: ModelName = "",
    namespace: NamespaceId = None,
    tiers: Tiers = None,
    what: What = (Clearable.KV,),
) -> ClearResponse:
    """Clear the cache of one model, or without `model` of every model, including the disk cache of
    models that are not loaded; these have nothing in memory. Blocks that live sequences hold stay
    with them; only their index is forgotten. Replays and stored responses are kept unless `what`
    names them; they have neither namespaces nor tiers, and responses are of all models.
    """
    _check_scope(namespace, tiers, what)
    known = [service.models.find(model)] if model else list(service.models.known.values())
    cleared, disk_bytes = list[ClearedModel](), 0
    if Clearable.KV in what:
        loaded = [each.loaded for each in known if each.loaded is not None]
        chosen_tiers = ALL_TIERS if tiers is None else frozenset(tiers)
        disk = service.settings.disk_cache_config()
        if disk is not None and namespace is None and CacheTier.DISK in chosen_tiers:
            disk_bytes = await _clear_unloaded(disk, known[0] if model else None)
        clears = (_clear(each, namespace, chosen_tiers) for each in loaded)
        cleared = await asyncio.gather(*clears)
        failures = [each.failure for each in cleared if each.failure is not None]
        if failures and len(failures) == len(cleared):
            raise EngineStopped(failures[0])
    forgotten = Remembered(
        replays=sum(each.forget_replays() for each in known) if Clearable.REPLAYS in what else 0,
        responses=responses.clear() if Clearable.RESPONSES in what else 0,
    )
    return ClearResponse(
        blocks_freed=sum(each.blocks_freed for each in cleared),
        bytes_freed=sum(each.bytes_freed for each in cleared),
        disk_bytes_freed=disk_bytes,
        models=cleared,
        forgotten=forgotten,
        kept=Remembered(replays=sum(each.n_replays for each in known), responses=len(responses)),
    )


async def _clear(
    loaded: LoadedModel, namespace: str | None, tiers: frozenset[CacheTier]
) -> ClearedModel:
    """The result for one loaded model, whose engine may have stopped."""
    cleared, failure = Cleared(0, 0), None
    try:
        cleared = await loaded.engine.clear_cache(namespace, tiers)
    except EngineStopped as error:
        failure = str(error)
    if CacheTier.MEMORY in tiers:
        loaded.forget_texts()  # of all namespaces: what they find is found again soon
    return ClearedModel(
        id=loaded.model.name,
        blocks_freed=cleared.blocks,
        bytes_freed=cleared.bytes,
        failure=failure,
    )


async def _clear_unloaded(disk: DiskCacheConfig, model: Model | None) -> int:
    """Clear the disk cache of the model if it is not loaded; None: of every model that is not
    loaded. Returns the bytes freed. Raises ApiError (409) where the model's folder is not known, or
    another daemon uses the directory.
    """
    fingerprint = ""
    if model is not None:
        if model.loaded is not None:
            return 0
        if model.card is None:
            raise not_loaded(
                f"The model '{model.name}' has not been loaded since the daemon started, so what "
                "it has on disk is not known; without a model all of it is cleared."
            )
        fingerprint = model.card.fingerprint
    try:
        return await to_thread.run_sync(clear_unloaded, disk, fingerprint)
    except ModelError as error:
        raise ApiError(409, str(error), code="disk_cache_in_use") from error


def _check_scope(
    namespace: str | None, tiers: Collection[CacheTier] | None, what: Collection[Clearable]
) -> None:
    """Raise ApiError (400) where a namespace or tiers are named for what has none."""
    if namespace is not None and set(what) != {Clearable.KV}:
        message = "only kv has any, so with one what may name nothing else"
        raise InvalidField("namespace", message)
    if tiers is not None and Clearable.KV not in what:
        raise InvalidField("tiers", "only kv has any, and what does not name it")


@router.endpoint("GET", "/stats", errors=(400, 404, 409))
async def cache_stats(loaded: LoadedDependency) -> CacheStatsResponse:
    """The statistics of the running step; of a stopped engine, the last ones."""
    return CacheStatsResponse.of(await loaded.engine.stats())


@router.endpoint("POST", "/probe", body=PromptOrChat, errors=MODEL_ERRORS)
async def probe_cache(context: Context) -> ProbeResponse:
    """With `cache_namespace: key`, the namespace of the API key is probed."""
    async with context.prepared(PromptOrChat, _probed_prompt) as (model, (prompt, salt)):
        packed, images = pack(prompt.tokens), prompt.images
        probed = await model.engine.probe(packed, salt, model.adapter, images)
    return ProbeResponse(
        prompt_tokens=len(prompt.tokens),
        cached_tokens=probed.cached_tokens,
        block_digests=list(probed.block_digests),
    )


def _probed_prompt(
    body: PromptOrChat, model: ServedModel, record: RequestRecord
) -> tuple[ChatPrompt, str]:
    """The prompt and its salt. Raises ApiError (400), and UnpreparedImages."""
    prompt = prompt_tokens(body, model, record)
    param = "messages" if body.prompt is None else "prompt"
    check_prompt(prompt.tokens, model.engine.card, param)
    return prompt, record.cache_salt(body.cache_salt)


NodeId = Annotated[int, Path(ge=0, le=2**63 - 1)]


class NodeText(BaseModel):
    """The text of the first tokens of a node. Only with `dashboard_text`."""

    id: int
    tokens: int
    text: str | None


NodeIds = Annotated[
    tuple[Annotated[int, Field(ge=0, le=2**63 - 1)], ...],
    Query(
        min_length=1,
        max_length=MOST_BEGINNINGS,
        description="Ids of nodes.",
        json_schema_extra={"minItems": 1, "maxItems": MOST_BEGINNINGS},
    ),
]


class Beginnings(BaseModel):
    """The first words of nodes, for labels. Empty without `dashboard_text`; evicted nodes are
    omitted.
    """

    shows_text: bool
    beginnings: dict[int, str] = Field(description="The text of the first 24 tokens, by node.")


@tree_router.endpoint("GET", "/tree", answer=CacheTree, errors=(400, 404, 409))
async def cache_tree(loaded: LoadedDependency, watch: WatchDependency) -> Response:
    """The cache as it is now. Bounded, however large that is; made four times a second at most."""
    async with watch.watching(loaded):
        return json_response((await watch.feed(loaded).fresh()).body)


@tree_router.endpoint(
    "GET",
    "/tree/stream",
    stream=unnamed_events(CacheTree),
    errors=(400, 404, 409),
    response_class=EventStream,
)
async def cache_tree_stream(
    context: Context, loaded: LoadedDependency, watch: WatchDependency
) -> Response:
    """The cache as it is now and whenever it has changed, once a second at most.

    A slow reader gets the latest, and not all of them.
    """
    return await event_stream(_pictures(loaded, watch), context)


async def _pictures(loaded: LoadedModel, watch: Watch) -> AsyncGenerator[bytes, None]:
    """Events until the engine has stopped."""
    feed = watch.feed(loaded)
    async with watch.watching(loaded):
        frame = await feed.fresh()
        with suppress(EngineStopped):  # there is nothing more to see
            while True:
                yield frame.event
                frame = await feed.next_after(frame.version)


@tree_router.endpoint("GET", "/nodes/{id}", errors=(400, 404, 409))
async def cache_node(id: NodeId, loaded: LoadedDependency, service: ServiceDependency) -> NodeText:
    """A node of the tree. Its text is shown only with `--dashboard-text`."""
    shows_text = service.settings.dashboard_text
    node = await loaded.engine.node(id, TEXT_TOKENS if shows_text else 0)
    if node is None:
        raise ApiError(404, f"There is no node {id} in the cache (any more).", code="no_such_node")
    text = None
    if shows_text:
        text = await to_thread.run_sync(_text_of, loaded.engine.tokenizer, node)
    return NodeText(id=id, tokens=node.tokens, text=text)


@tree_router.endpoint("GET", "/nodes", errors=(400, 404, 409))
async def cache_beginnings(
    ids: NodeIds, service: ServiceDependency, model: ModelName = ""
) -> Beginnings:
    """The first words of several nodes. They are shown only with `--dashboard-text`. Without it the
    model need not be loaded.
    """
    if not service.settings.dashboard_text:
        return Beginnings(shows_text=False, beginnings={})
    loaded = service.models.loaded(model)
    nodes = [await loaded.engine.node(each, BEGINNING_TOKENS) for each in ids]
    found = [node for node in nodes if node is not None]
    tokenizer = loaded.engine.tokenizer
    texts = await to_thread.run_sync(lambda: {node.id: _text_of(tokenizer, node) for node in found})
    return Beginnings(shows_text=True, beginnings=texts)


def _text_of(tokenizer: Tokenizer, node: NodeTokens) -> str:
    """The text of a node, with a word in place of each image."""
    runs = groupby(node.token_ids, IMAGE.__eq__)
    return "".join("[image]" if is_image else tokenizer.decode([*ids]) for is_image, ids in runs)
