"""Models as Ollama lists, describes and pulls them."""

from collections.abc import AsyncGenerator, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from anyio import move_on_after
from blake3 import blake3
from pydantic_core import to_json

from engine.api import ModelError
from engine.launch import Checkpoint, open_checkpoint
from engine.values.model import ModelCard, SamplingDefaults, Task
from engine.values.stats import ModelMemory
from server.dialects.error_shapes import ollama_error
from server.dialects.job import wire_json
from server.dialects.ollama.schema import (
    OllamaDetails,
    OllamaModel,
    OllamaModelInfo,
    OllamaProgress,
    OllamaRunningModel,
)
from server.errors import SERVER, ApiError
from server.generation.requests import ServedModel
from server.http.stream import json_line
from server.models.hub import Download
from server.parsing.registry import chosen, detect
from server.settings.models import ModelSettings

LATEST = ":latest"
"""The tag that Ollama's clients add to a name without one."""

HUBS = ("hf.co/", "huggingface.co/")
"""How Ollama's names of Hugging Face's repositories begin."""

FOREVER = datetime(9999, 1, 1, tzinfo=UTC)
NEVER = datetime.fromtimestamp(0, UTC)


def repository(name: str) -> str:
    """The repository of Hugging Face that a name means."""
    for hub in HUBS:
        name = name.removeprefix(hub)
    return name.removesuffix(LATEST)


def _opened(source: str) -> Checkpoint | None:
    """The files of a directory, or of a repository in the cache. None where there are none, or they
    are not whole.
    """
    try:
        return open_checkpoint(source)
    except ModelError:
        return None


def _digest(source: str, checkpoint: Checkpoint | None) -> str:
    """64 hexadecimal digits: of the source's name where its files cannot be read. Ollama's clients
    show the first twelve.
    """
    return blake3(source.encode()).hexdigest() if checkpoint is None else checkpoint.digest


def _details(checkpoint: Checkpoint | None) -> OllamaDetails:
    config = {} if checkpoint is None else checkpoint.config
    n_parameters = None if checkpoint is None else checkpoint.n_parameters
    family = _family(config)
    return OllamaDetails(
        parent_model="",
        format="safetensors",
        family=family,
        families=[family] if family else [],
        parameter_size="" if n_parameters is None else human_number(n_parameters),
        quantization_level=_quantization(config),
    )


def _family(config: Mapping[str, Any]) -> str:
    return str(config.get("model_type", ""))


def _quantization(config: Mapping[str, Any]) -> str:
    match config:
        case {"quantization": {"bits": int(bits)}}:
            return f"{bits}-bit"
        case {"dtype": str(dtype)} | {"torch_dtype": str(dtype)}:
            return dtype
        case _:
            return ""


def human_number(number: int) -> str:
    """A number of parameters as Ollama writes it: 8B, 1.5B, 494.03M, 120K."""
    for unit, size, decimals in (("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 0)):
        if number >= size:
            return f"{number / size:.{decimals if number % size else 0}f}{unit}"
    return str(number)


def listed(name: str, source: str) -> OllamaModel:
    """Reads the checkpoint's files, as `running` and `described` do."""
    checkpoint = _opened(source)
    return OllamaModel(
        name=name,
        model=name,
        modified_at=NEVER if checkpoint is None else checkpoint.modified,
        size=0 if checkpoint is None else checkpoint.n_bytes,
        digest=_digest(source, checkpoint),
        details=_details(checkpoint),
    )


def running(
    model: ServedModel, source: str, memory: ModelMemory, seconds_left: float | None
) -> OllamaRunningModel:
    """`seconds_left` until it is unloaded for its age; None: never."""
    card, checkpoint = model.engine.card, _opened(source)
    expires = FOREVER
    if seconds_left is not None:
        expires = datetime.now(UTC) + timedelta(seconds=seconds_left)
    return OllamaRunningModel(
        name=model.name,
        model=model.name,
        size=memory.kept_bytes,
        digest=_digest(source, checkpoint),
        details=_details(checkpoint),
        expires_at=expires,
        size_vram=memory.kept_bytes if card.device.startswith("gpu") else 0,
        context_length=card.max_sequence_tokens,
    )


def described(name: str, settings: ModelSettings, card: ModelCard | None) -> OllamaModelInfo:
    """The facts that Ollama shows of a model, loaded or not. A loaded model (`card`) may have a
    smaller context, if the KV cache holds less than the model accepts.
    """
    try:
        return _described(name, open_checkpoint(settings.source), settings, card)
    except ModelError:
        return _undescribed(name)


def _described(
    name: str, checkpoint: Checkpoint, settings: ModelSettings, card: ModelCard | None
) -> OllamaModelInfo:
    """Raises ModelError for a file that cannot be read."""
    family = _family(checkpoint.config)
    context_tokens = card.max_sequence_tokens if card else checkpoint.max_context_tokens
    numbers = {
        "general.parameter_count": checkpoint.n_parameters,
        f"{family}.context_length": context_tokens,
        f"{family}.embedding_length": checkpoint.dimensions,
    }
    reads_defaults = settings.engine.generation_config == "auto"
    sampling = checkpoint.sampling() if reads_defaults else SamplingDefaults()
    parameters = list(_parameters(sampling))
    return OllamaModelInfo(
        modelfile="\n".join([f"FROM {name}", *(f"PARAMETER {line}" for line in parameters)]),
        parameters="\n".join(parameters),
        template=checkpoint.chat_template,
        details=_details(checkpoint),
        model_info={
            "general.architecture": family,
            "general.basename": name,
            **{key: number for key, number in numbers.items() if number is not None},
        },
        capabilities=list(_capabilities(checkpoint, settings, card)),
        modified_at=checkpoint.modified,
    )


def _undescribed(name: str) -> OllamaModelInfo:
    """A model whose files cannot be read, such as a repository that has not been fetched."""
    return OllamaModelInfo(
        modelfile=f"FROM {name}",
        parameters="",
        template="",
        details=_details(None),
        model_info={"general.architecture": "", "general.basename": name},
        capabilities=["completion"],
        modified_at=NEVER,
    )


def _parameters(sampling: SamplingDefaults) -> Iterator[str]:
    yield f"temperature {sampling.temperature}"
    yield f"top_p {sampling.top_p}"
    yield f"top_k {sampling.top_k}"
    yield f"min_p {sampling.min_p}"
    yield f"repeat_penalty {sampling.repetition_penalty}"


def _capabilities(
    checkpoint: Checkpoint, settings: ModelSettings, card: ModelCard | None
) -> Iterator[str]:
    """A model that generates and embeds has no `embedding`: Ollama's CLI embeds whatever it is
    given for a model that has. Whether a model takes images is certain once it has been loaded.
    """
    try:
        tasks = checkpoint.tasks(settings.engine.pooling, settings.engine.reranker)
    except ModelError:  # it cannot be loaded
        return
    if Task.GENERATE in tasks:
        yield "completion"
        found = detect(checkpoint.chat_template, checkpoint.added_tokens)
        formats = chosen(settings.tool_parser, settings.reasoning_parser, found)
        if formats.tools:
            yield "tools"
        if formats.reasoning:
            yield "thinking"
        has_tower = "vision_config" in checkpoint.config
        if has_tower if card is None else card.images is not None:
            yield "vision"
    elif Task.EMBED in tasks:
        yield "embedding"


LINE_SECONDS = 0.25  # between two lines

SUCCESS: OllamaProgress = {"status": "success"}


async def pulled(download: Download | None) -> None:
    """Wait for the end; None: there is nothing to fetch. Raises ApiError (500), as Ollama does,
    with what went wrong.
    """
    if download is None:
        return
    await download.ended.wait()
    if download.error:
        raise ApiError(500, download.error, type=SERVER, code="pull_failed")


async def pull_lines(download: Download | None) -> AsyncGenerator[bytes, None]:
    """Lines up to `success`, or to the error. None: there is nothing to fetch."""
    yield _line({"status": "pulling manifest"})
    sent = (0, 0)
    while download is not None and not download.ended.is_set():
        with move_on_after(LINE_SECONDS):
            await download.ended.wait()
        progress = download.done_bytes, download.total_bytes
        if progress != sent and not download.ended.is_set():
            sent = progress
            yield _line(_progress(download))
    try:
        await pulled(download)
    except ApiError as error:
        yield json_line(wire_json(ollama_error(error)))
    else:
        yield _line(SUCCESS)


def _progress(download: Download) -> OllamaProgress:
    return {
        "status": f"pulling {download.repository}",
        "digest": download.repository,
        "total": download.total_bytes,
        "completed": download.done_bytes,
    }


def _line(progress: OllamaProgress) -> bytes:
    return json_line(to_json(progress))
