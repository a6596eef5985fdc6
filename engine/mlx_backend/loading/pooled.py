"""What embeds or reranks, made of a loaded model and of what its checkpoint is for."""

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from engine.api import ModelError
from engine.mlx_backend.errors import UnsupportedModel
from engine.mlx_backend.loading.headless import classifier
from engine.mlx_backend.loading.loader import LoadedModel
from engine.mlx_backend.loading.purpose import Embedding, Ranking
from engine.mlx_backend.model.patches import OutputHead
from engine.mlx_backend.pooling import HIDDEN_STATES, Pooler
from engine.values.model import Embedder, Reranker

QWEN3_RERANKER = """\
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ messages | selectattr("role", "equalto", "system") | map(attribute="content") \
| first | default("Given a web search query, retrieve relevant passages that answer the query") }}
<Query>: {{ messages | selectattr("role", "equalto", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "equalto", "document") | map(attribute="content") \
| first }}<|im_end|>
<|im_start|>assistant
<think>

</think>

{{ "" }}"""
"""How Qwen3-Reranker asks, as its model card has it: with roles of its own, as vLLM's templates of
rerankers have them."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """What the runner pools with, and what the server must know of it."""

    pooler: Pooler = HIDDEN_STATES
    embedder: Embedder | None = None
    reranker: Reranker | None = None
    template: str = ""  # in place of the tokenizer's own


def pooled_by(loaded: LoadedModel, head: OutputHead, checkpoint: Path) -> Pooled:
    """Raises ModelError where the model's hidden states cannot be had, or no score made of them."""
    purpose = loaded.purpose
    if purpose.embedding is None and purpose.ranking is None:
        return Pooled()
    if not head.dimensions:
        raise UnsupportedModel("its hidden states cannot be had: they are not projected as usual")
    if purpose.ranking is not None:
        return _reranker(loaded, head, checkpoint, purpose.ranking)
    assert purpose.embedding is not None
    return Pooled(embedder=_embedder(purpose.embedding, head.dimensions))


def _embedder(embedding: Embedding, dimensions: int) -> Embedder:
    return Embedder(
        pooling=embedding.pooling,
        dimensions=dimensions,
        normalized=embedding.normalized,
        prompts=embedding.prompts,
        default_prompt=embedding.default_prompt,
    )


def _reranker(loaded: LoadedModel, head: OutputHead, checkpoint: Path, ranking: Ranking) -> Pooled:
    tokenizer = loaded.tokenizer
    if ranking.tokens:
        weight = head.rows([_token_id(tokenizer, token) for token in ranking.tokens])
    else:
        weight = classifier(checkpoint)
    own = takes_pairs(tokenizer)
    template = QWEN3_RERANKER if loaded.model.model_type == "qwen3" and not own else ""
    return Pooled(
        pooler=Pooler(_one_label(weight)),
        reranker=Reranker(ranking.has_sigmoid, is_templated=own or bool(template)),
        template=template,
    )


def takes_pairs(tokenizer: TokenizerWrapper) -> bool:
    """Whether its chat template knows queries and documents."""
    template = tokenizer.chat_template
    source = template if isinstance(template, str) else ""
    return all(f'"{role}"' in source or f"'{role}'" in source for role in ("query", "document"))


def _one_label(weight: mx.array) -> mx.array:
    """A softmax over two labels is a sigmoid of what lies between them. `[1, dimensions]`."""
    labels = weight.shape[0]
    if labels > 2:
        raise UnsupportedModel(f"its classifier has {labels} labels; a reranker has one, or two")
    one = weight[1:] - weight[:1] if labels == 2 else weight
    mx.eval(one)
    return one


def _token_id(tokenizer: TokenizerWrapper, token: str) -> int:
    token_id = tokenizer.convert_tokens_to_ids(token)
    if token_id is None or token_id == tokenizer.unk_token_id:
        raise ModelError(f"its tokenizer has no token {token!r}, which a score would be made of")
    return int(token_id)
