"""The served models as Ollama's clients want to hear of them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from engine.launch import ModelError, find_checkpoint
from engine.types.memory import MemoryPromise
from engine.types.model import ModelCard, SamplingDefaults
from server.generation.models import ServedModel
from server.schemas.ollama.models import (
    OllamaDetails,
    OllamaModel,
    OllamaModelInfo,
    OllamaRunningModel,
)

LATEST = ":latest"
"""The tag that Ollama's clients add to a name without one."""

HUBS = ("hf.co/", "huggingface.co/")
"""How Ollama's names of Hugging Face's repositories begin."""

FOREVER = datetime(9999, 1, 1, tzinfo=UTC)


def repository(name: str) -> str:
    """The repository of Hugging Face that a name means."""
    for hub in HUBS:
        name = name.removeprefix(hub)
    return name.removesuffix(LATEST)


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """What a directory says. Empty where there is none (any more)."""

    config: dict[str, Any]
    n_bytes: int
    modified: datetime

    @property
    def family(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def context_tokens(self) -> int:
        """Zero where the files do not say."""
        parts = (self.config, self.config.get("text_config") or {})
        found = (part.get("max_position_embeddings") for part in parts)
        return next((n for n in found if isinstance(n, int)), 0)

    @property
    def details(self) -> OllamaDetails:
        return OllamaDetails(
            parent_model="",
            format="safetensors",
            family=self.family,
            families=[self.family] if self.family else [],
            parameter_size="",
            quantization_level=self._quantization,
        )

    @property
    def _quantization(self) -> str:
        match self.config:
            case {"quantization": {"bits": int(bits)}}:
                return f"{bits}-bit"
            case {"dtype": str(dtype)} | {"torch_dtype": str(dtype)}:
                return dtype
            case _:
                return ""


def _checkpoint(source: str) -> _Checkpoint:
    """Of a directory, or a repository in the cache."""
    try:
        directory = find_checkpoint(source, download=False)
    except ModelError:
        return _Checkpoint({}, 0, datetime.fromtimestamp(0, UTC))
    config = directory / "config.json"
    return _Checkpoint(
        config=json.loads(config.read_bytes()),
        n_bytes=sum(file.stat().st_size for file in directory.iterdir() if file.is_file()),
        modified=datetime.fromtimestamp(config.stat().st_mtime, UTC),
    )


def listed(name: str, source: str, card: ModelCard | None) -> OllamaModel:
    """Reads the checkpoint's config.json, as all of these do. There is no card before the model has
    been loaded for the first time.
    """
    checkpoint = _checkpoint(source)
    return OllamaModel(
        name=name,
        model=name,
        modified_at=checkpoint.modified,
        size=checkpoint.n_bytes,
        digest=card.fingerprint if card else "",
        details=checkpoint.details,
    )


def running(
    model: ServedModel, promise: MemoryPromise, seconds_left: float | None
) -> OllamaRunningModel:
    """`seconds_left` until it is unloaded for its age; None: never."""
    card = model.engine.card
    expires = FOREVER
    if seconds_left is not None:
        expires = datetime.now(UTC) + timedelta(seconds=seconds_left)
    return OllamaRunningModel(
        name=model.name,
        model=model.name,
        size=promise.kept,
        digest=card.fingerprint,
        details=_checkpoint(card.checkpoint).details,
        expires_at=expires,
        size_vram=promise.kept if card.device.startswith("gpu") else 0,
        context_length=card.max_sequence_tokens,
    )


def described(model: ServedModel) -> OllamaModelInfo:
    card = model.engine.card
    checkpoint = _checkpoint(card.checkpoint)
    parameters = list(_parameters(card.sampling))
    family = checkpoint.family
    return OllamaModelInfo(
        modelfile="\n".join([f"FROM {model.name}", *(f"PARAMETER {line}" for line in parameters)]),
        parameters="\n".join(parameters),
        template=model.engine.tokenizer.chat_template,
        details=checkpoint.details,
        model_info={
            "general.architecture": family,
            "general.basename": model.name,
            f"{family}.context_length": card.max_sequence_tokens,
        },
        capabilities=list(_capabilities(model)),
        modified_at=checkpoint.modified,
    )


def described_unloaded(name: str, source: str) -> OllamaModelInfo:
    """What the files say."""
    checkpoint = _checkpoint(source)
    return OllamaModelInfo(
        modelfile=f"FROM {name}",
        parameters="",
        template="",
        details=checkpoint.details,
        model_info={
            "general.architecture": checkpoint.family,
            "general.basename": name,
            f"{checkpoint.family}.context_length": checkpoint.context_tokens,
        },
        capabilities=["completion"],
        modified_at=checkpoint.modified,
    )


def _parameters(sampling: SamplingDefaults) -> Iterator[str]:
    yield f"temperature {sampling.temperature}"
    yield f"top_p {sampling.top_p}"
    yield f"top_k {sampling.top_k}"
    yield f"min_p {sampling.min_p}"
    yield f"repeat_penalty {sampling.repetition_penalty}"


def _capabilities(model: ServedModel) -> Iterator[str]:
    yield "completion"
    if model.planner.calls:
        yield "tools"
    if model.planner.reasons:
        yield "thinking"
