"""Opens encoders: their memory, their weights, and the function that computes a forward."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from engine.api import ModelError, Report, one_line
from engine.core.step import Limits
from engine.encoders.thread import EncoderParts
from engine.mlx_backend import host
from engine.mlx_backend.blas import Blas
from engine.mlx_backend.encoders.models import (
    MOST_SCORES,
    Batch,
    longest_text,
    open_body,
    open_head,
    pooled,
)
from engine.mlx_backend.kv.formats import dtype_name
from engine.mlx_backend.loading.checkpoint import (
    WEIGHTS,
    Checkpoint,
    fingerprint,
    first_number,
    read_header,
)
from engine.mlx_backend.loading.compiler import start_compiler
from engine.mlx_backend.loading.memory import PROCESS_BYTES
from engine.mlx_backend.loading.purpose import Purpose, find_purpose, longest_text_stated
from engine.text.tokenizer import pretrained_tokenizer
from engine.values.model import ModelCard, Reranker
from engine.values.settings import EngineConfig
from engine.values.stats import ModelMemory, readable_bytes
from engine.values.tokens import PackedTokens, pack

CPU_STREAMS = 2
"""Parts of a forward that a CPU computes at the same time: one core computes all that is no matrix
product, and meanwhile the others multiply for the other part.
"""


@dataclass(frozen=True, slots=True)
class OpenedEncoder:
    """An encoder whose weights have not been read, and the machine as it was before."""

    checkpoint: Path
    config: Mapping[str, Any]  # config.json
    purpose: Purpose
    max_tokens: int  # of a text
    dtype: mx.Dtype
    machine: host.Machine
    used_bytes: int  # that MLX had given out
    step_tokens: int

    @property
    def memory(self) -> ModelMemory:
        """What the model takes: weights, and twice the arrays of a forward, because MLX keeps the
        buffers of one for the next. Raises ModelError if that is more than there is.
        """
        weights, room = self._weight_bytes, self.machine.most_bytes
        computing = PROCESS_BYTES + 2 * self.forward_bytes
        total = weights + computing
        if total > room:
            raise ModelError(
                f"the model does not fit: it needs {readable_bytes(total)} (weights "
                f"{readable_bytes(weights)}, computing {readable_bytes(computing)}), and there is "
                f"{readable_bytes(room)}: lower max_model_len or step_tokens"
            )
        return ModelMemory(weights, 0, 0, computing, process_bytes=0, total_bytes=total)

    @property
    def forward_bytes(self) -> int:
        """An upper bound of the arrays of a forward, all of one layer at once."""
        hidden = int(self.config["hidden_size"])
        wide = int(self.config.get("intermediate_size") or 4 * hidden)
        tokens = max(self.step_tokens, self.max_tokens)
        scores = min(
            int(self.config["num_attention_heads"]) * tokens * self.max_tokens, MOST_SCORES
        )
        masks = self.max_tokens**2
        return 4 * (tokens * (12 * hidden + 6 * wide) + 4 * scores + masks)

    @property
    def _weight_bytes(self) -> int:
        shapes = (
            tensor.shape
            for file in self.checkpoint.glob(WEIGHTS)
            for tensor in read_header(file).tensors.values()
        )
        return self.dtype.size * sum(map(prod, shapes))


def open_encoder(config: EngineConfig, checkpoint: Path) -> OpenedEncoder:
    """Open an encoder that is to be served with this configuration. Raises ModelError."""
    used_bytes, machine = mx.get_active_memory(), host.examine_for(config.memory_bytes)
    purpose = find_purpose(checkpoint, config.pooling, config.reranker)
    stated = Checkpoint(checkpoint).config
    if config.adapters:
        raise ModelError("an encoder takes no adapters")
    if stated.get("quantization") or stated.get("quantization_config"):
        raise ModelError("its weights are quantized, which encoders here are not")
    most = longest_text(stated)
    asked = config.max_model_len
    if asked is not None and asked > most:
        raise ModelError(
            f"max_model_len of {asked:,} tokens is more than the model's positions, {most:,}: "
            "lower it, or leave it unset"
        )
    is_cpu = mx.default_device() == mx.cpu
    name = str(stated.get("dtype") or stated.get("torch_dtype") or "float32")
    dtype = {"float16": mx.float16, "bfloat16": mx.bfloat16}.get(name, mx.float32)
    return OpenedEncoder(
        checkpoint=checkpoint,
        config=stated,
        purpose=purpose,
        max_tokens=asked or min(most, longest_text_stated(checkpoint) or most),
        dtype=mx.float32 if is_cpu else dtype,
        machine=machine,
        used_bytes=used_bytes,
        step_tokens=config.step_tokens,
    )


def assemble_encoder(
    config: EngineConfig, opened: OpenedEncoder, blas: Blas, report: Report
) -> EncoderParts:
    """Read the weights, and compute a first forward. Raises ModelError."""
    memory = opened.memory
    compiler = start_compiler()
    problem = "" if compiler is None else compiler.problem()
    if problem:
        mx.disable_compile()  # or MLX would raise wherever it fuses operations
        report(f"{problem}: MLX fuses no operations, and forwards take longer")
    cache_bytes = opened.forward_bytes
    host.limit_allocator(opened.used_bytes + opened.machine.most_bytes, cache_bytes)
    report(f"loading weights, {readable_bytes(memory.weights_bytes)}…")
    tokenizer = _tokenizer(opened)
    meter = host.MemoryMeter(memory, PROCESS_BYTES + 2 * cache_bytes, opened.used_bytes)
    separator = tokenizer.sep_token_id
    encode = TextEncoder(opened, -1 if separator is None else separator, meter.step)
    (first,) = encode([pack([0])])
    embedder, ranking = opened.purpose.embedder, opened.purpose.ranking
    if embedder is not None:
        embedder = replace(embedder, dimensions=len(first) // 4)
    card = replace(
        planned_card(config, opened, blas),
        embedder=embedder,
        slowdowns=(f"MLX fuses no operations: {problem}. Mend that, and start again.",)
        if problem
        else (),
        reranker=None if ranking is None else Reranker(ranking.has_sigmoid, is_templated=False),
    )
    report(f"weights: {readable_bytes(memory.weights_bytes)}")
    report(f"tasks: {', '.join(card.tasks)}; texts of up to {opened.max_tokens:,} tokens")
    limits = Limits(
        vocab_size=card.vocab_size,
        max_context_tokens=card.max_context_tokens,
        arena_tokens=card.arena_tokens,
        max_running=1,
        max_waiting=config.max_waiting,
        step_tokens=config.step_tokens,
        pools=True,
    )
    return EncoderParts(
        encode=encode,
        card=card,
        limits=limits,
        memory=meter.stats,
        release_unused=host.release_unused,
        release_thread=mx.clear_streams,
    )


class TextEncoder:
    """Computes forwards of a loaded encoder: the vectors of texts, or the scores of pairs."""

    def __init__(
        self,
        opened: OpenedEncoder,
        separator: int,
        measured: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Read the weights. `separator` is the token after the first text of a pair. Each forward
        is computed within `measured`. Raises ModelError for weights that do not fit config.json.
        """
        config, named = opened.config, _weights(opened)
        embedder = opened.purpose.embedder
        is_cpu = mx.default_device() == mx.cpu
        n_streams = CPU_STREAMS if is_cpu else 1
        self._streams = [mx.new_stream(mx.default_device()) for _ in range(n_streams)]
        self._separator = separator
        self._measured = measured
        self._body = open_body(config, named)
        self._head = None if embedder is not None else open_head(config, named)
        self._pooling = None if embedder is None else embedder.pooling

    def __call__(self, texts: Sequence[PackedTokens]) -> list[bytes]:
        """For each text its vector or its score, little-endian float32. Texts of about the same
        length should be neighbours.
        """
        with self._measured():
            # Padded each for itself, and on a CPU at the same time.
            size = -(-len(texts) // len(self._streams))
            parts = [texts[start : start + size] for start in range(0, len(texts), size)]
            found = list[mx.array]()
            for part, stream in zip(parts, self._streams, strict=False):
                with mx.stream(stream):
                    found.append(self._computed(self._batch(part)))
            mx.async_eval(found)
            rows = np.concatenate([np.array(part) for part in found])
        return [row.astype("<f4").tobytes() for row in rows]

    def _computed(self, batch: Batch) -> mx.array:
        """The vectors or scores, float32 `[texts, numbers]`. Not evaluated."""
        hidden = self._body(batch)
        if self._head is not None:
            return self._head(hidden, batch).astype(mx.float32)
        assert self._pooling is not None, "without a head a text is pooled"
        return pooled(hidden, batch, self._pooling)

    def _batch(self, texts: Sequence[PackedTokens]) -> Batch:
        lengths = np.array([len(text) for text in texts], np.int32)
        ids = np.zeros((len(texts), lengths.max()), np.int32)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = np.frombuffer(text.packed, np.uint32)
        types = np.zeros_like(ids)
        if self._head is not None:
            ends = ids == self._separator
            types[np.cumsum(ends, axis=1) - ends > 0] = 1
        return Batch(mx.array(ids), mx.array(lengths), mx.array(types))


def _weights(opened: OpenedEncoder) -> dict[str, mx.array]:
    """The weights of the checkpoint by their names, in the type that is computed with."""
    named = dict[str, mx.array]()
    for file in opened.checkpoint.glob(WEIGHTS):
        tensors = mx.load(str(file))
        assert isinstance(tensors, dict), "safetensors are named"
        named |= tensors
    floating = {
        name: array.astype(opened.dtype)
        for name, array in named.items()
        if mx.issubdtype(array.dtype, mx.floating)
    }
    mx.eval(list(floating.values()))
    return floating


def _tokenizer(opened: OpenedEncoder) -> Any:
    """transformers' fast tokenizer. Raises ModelError if it has tokens that the model does not."""
    try:
        tokenizer = pretrained_tokenizer(str(opened.checkpoint))
    except Exception as error:
        raise ModelError(f"cannot load its tokenizer: {one_line(error)}") from error
    if not tokenizer.is_fast:
        raise ModelError("the checkpoint has no tokenizer.json, and none can be made of its files")
    largest, vocab_size = max(tokenizer.get_vocab().values(), default=0), _vocab_size(opened)
    if largest >= vocab_size:
        raise ModelError(
            f"the tokenizer is not the model's: its tokens go up to {largest:,}, and the model has "
            f"{vocab_size:,}"
        )
    return tokenizer


def _vocab_size(opened: OpenedEncoder) -> int:
    return first_number(opened.config, ("vocab_size",)) or 0


def planned_card(config: EngineConfig, opened: OpenedEncoder, blas: Blas) -> ModelCard:
    """The model's card as far as it is known before the weights are read."""
    return ModelCard(
        name=config.model,
        fingerprint=fingerprint(opened.checkpoint),
        vocab_size=_vocab_size(opened),
        model_context_tokens=longest_text(opened.config),
        max_context_tokens=opened.max_tokens,
        eos_token_ids=frozenset(),
        kv_bytes_per_token=0,
        arena_tokens=opened.max_tokens,
        block_size=config.block_size,
        device=opened.machine.device,
        dtype=dtype_name(opened.dtype),
        blas=str(blas),
        checkpoint=str(opened.checkpoint),
        generates=False,
        kv_format="",
        license=Checkpoint(opened.checkpoint).license,
        batching="whole texts of about the same length",
    )
