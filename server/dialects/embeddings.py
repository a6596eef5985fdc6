"""OpenAI's embeddings, which are never streamed."""

from collections.abc import Sequence

from server.dialects.dialect import wire_json
from server.errors import invalid
from server.generation.embedding_task import EmbeddingTask
from server.generation.events import UsageMeter
from server.generation.pooled import PooledText
from server.generation.vectors import base64, vector
from server.schemas.common import PromptTokensDetails
from server.schemas.embeddings import Embedding, EmbeddingList, EmbeddingRequest, PooledUsage


def check_not_empty(body: EmbeddingRequest) -> None:
    """Raise ApiError (400) for an input that is empty, as OpenAI does."""
    for name, one in zip(body.input_names, body.input, strict=True):
        if not one:
            raise invalid(f"{name}: must not be empty", name)


class EmbeddingBuilder:
    """A ResponseBuilder of embeddings, in the order of the inputs."""

    def __init__(self, task: EmbeddingTask) -> None:
        self.engine = task.model.engine
        self.requests = task.requests
        self.meter = task.meter
        self.task = task

    def new_choice(self) -> PooledText:
        return PooledText()

    def whole(self, choices: Sequence[PooledText]) -> bytes:
        answer = EmbeddingList(
            object="list",
            data=[self._embedding(index, one) for index, one in enumerate(choices)],
            model=self.task.model.name,
            usage=pooled_usage(self.meter),
        )
        return wire_json(answer)

    def _embedding(self, index: int, one: PooledText) -> Embedding:
        found = vector(one.pooled, self.task.embedder, self.task.body.dimensions)
        as_text = self.task.body.encoding_format == "base64"
        numbers = base64(found) if as_text else found.tolist()
        return Embedding(object="embedding", index=index, embedding=numbers)


def pooled_usage(meter: UsageMeter) -> PooledUsage:
    total = meter.total
    return PooledUsage(
        prompt_tokens=total.prompt_tokens,
        total_tokens=total.prompt_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=total.cached_tokens),
    )
