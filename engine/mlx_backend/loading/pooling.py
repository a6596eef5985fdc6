"""How a model that was made to embed or to rerank pools its hidden states."""

from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from engine.api import ModelError
from engine.mlx_backend.loading.checkpoint import WEIGHTS, read_header
from engine.mlx_backend.loading.loader import CLASSIFIER, LoadedModel
from engine.mlx_backend.model.cached_model import HIDDEN_STATES, Pooler
from engine.mlx_backend.model.patches import OutputHead
from engine.values.model import Embedder, Reranker

_QWEN3_RERANKER = """\
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
"""The prompt of Qwen3-Reranker by its model card, with the roles of vLLM's reranker templates."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """How the runner pools hidden states, and how the server describes the result."""

    pooler: Pooler = HIDDEN_STATES
    embedder: Embedder | None = None
    reranker: Reranker | None = None
    template: str = ""  # in place of the tokenizer's own


def pooled_by(loaded: LoadedModel, head: OutputHead, checkpoint: Path) -> Pooled:
    """How a loaded model embeds or reranks. Raises ModelError if its hidden states are not
    accessible, or no score can be made of them.
    """
    embedder, ranking = loaded.purpose.embedder, loaded.purpose.ranking
    if embedder is None and ranking is None:
        return Pooled()
    if not head.dimensions:
        raise ModelError("its hidden states cannot be had: they are not projected as usual")
    if embedder is not None:
        return Pooled(embedder=replace(embedder, dimensions=head.dimensions))
    assert ranking is not None
    tokenizer = loaded.tokenizer
    if ranking.tokens:
        token_ids = tokenizer.convert_tokens_to_ids(list(ranking.tokens))
        for token, token_id in zip(ranking.tokens, token_ids, strict=True):
            if token_id is None or token_id == tokenizer.unk_token_id:
                raise ModelError(
                    f"its tokenizer has no token {token!r}, from which a score is made"
                )
        weight = head.rows(token_ids)
    else:
        weight = _classifier(checkpoint)
    labels = weight.shape[0]
    if labels > 2:
        raise ModelError(f"its classifier has {labels} labels; a reranker has one, or two")
    if labels == 2:  # a softmax over two labels is a sigmoid of their difference
        weight = weight[1:] - weight[:1]
    mx.eval(weight)
    source = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    takes_pairs = all(
        f'"{role}"' in source or f"'{role}'" in source for role in ("query", "document")
    )
    template = "" if takes_pairs or loaded.model.model_type != "qwen3" else _QWEN3_RERANKER
    return Pooled(
        pooler=Pooler(weight),
        reranker=Reranker(ranking.has_sigmoid, is_templated=takes_pairs or bool(template)),
        template=template,
    )


def _classifier(checkpoint: Path) -> mx.array:
    """The classifier's weights, float32 `[labels, dimensions]`. Raises ModelError without any."""
    for file in checkpoint.glob(WEIGHTS):
        if CLASSIFIER in read_header(file).tensors:
            tensors = mx.load(str(file))
            assert isinstance(tensors, dict), "safetensors are named"
            return tensors[CLASSIFIER].astype(mx.float32)
    raise ModelError(f"the classifier is missing: no weight file has {CLASSIFIER}")
