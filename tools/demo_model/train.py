"""Training: the cross-entropy of the assistant's tokens, Muon and AdamW, on two threads."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, cast

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.qwen3 import Model, ModelArgs
from transformers import PreTrainedTokenizerFast

from tools.demo_model.curriculum import (
    ALL,
    COPYING,
    Shares,
    Stages,
    conversation,
    conversations,
    shares_at,
)
from tools.demo_model.forward import hidden_states
from tools.demo_model.tokens import VOCAB_SIZE, Sample, sample
from tools.demo_model.words import Words

CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "float16",
}
BATCH_TOKENS = 4096
_POOL = 1024  # conversations sorted by length together, so that a batch pads little
_LONG_EVERY = 25  # every so many batches one of long conversations
_LONG_TOKENS = (512, 1024, 2048, 4096)
_THREADS = 2


@dataclass(frozen=True, slots=True)
class Rates:
    """The learning rates by step: warm-up, constant, and linear decay to 0 over the last steps.

    A run that is stopped while they are constant, and resumed with another number of steps, ends
    like a run that had that number from the start.
    """

    steps: int
    muon: float
    adam: float
    warmup_steps: int
    decay_share: float

    def of(self, peak: float) -> Callable[[mx.array], mx.array]:
        """The rate at a step, for one peak."""

        def rate(step: mx.array) -> mx.array:
            up = (step + 1) / self.warmup_steps
            down = (self.steps - step) / (self.steps * self.decay_share)
            return peak * mx.clip(mx.minimum(up, down), 0.0, 1.0)

        return rate


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids `[rows, length]`, padded at the end, and the tokens that are trained.

    `said` are the flattened positions before these tokens, whose ids are `targets`.
    """

    ids: mx.array
    said: mx.array
    targets: mx.array


class Trainer:
    """A model in training, with the state of its optimizers, which can be saved and resumed."""

    def __init__(self, rates: Rates, seed: int, config: Mapping[str, Any] = CONFIG) -> None:
        mx.random.seed(seed)
        self.model = _model(config)
        self.step = 0
        self._optimizers = [_optimizer(rates) for _ in range(_THREADS)]
        for optimizer, part in zip(self._optimizers, self._parts(), strict=True):
            optimizer.init(part)
            mx.eval(optimizer.state)
        self._helpers = [Helper(config) for _ in range(_THREADS)]
        self._threads = ThreadPoolExecutor(_THREADS)

    def begin_with(self, weights: Mapping[str, mx.array]) -> None:
        """Begin with trained weights. The state of the optimizers is not changed."""
        self.model.load_weights(list(weights.items()))
        mx.eval(self.model.parameters())

    def learn(self, halves: Sequence[Batch]) -> float:
        """Take one step on two batches, in parallel. Returns the mean loss of a token."""
        parameters = self.model.trainable_parameters()
        total = sum(half.targets.size for half in halves)
        (loss, gradients), (other_loss, other_gradients) = self._threads.map(
            lambda helper, half: helper.gradients(parameters, half, total), self._helpers, halves
        )
        gradients = tree_map(mx.add, gradients, other_gradients)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        mx.eval(gradients)
        updated = self._threads.map(_updated, self._optimizers, _parts(gradients), self._parts())
        for part in updated:
            self.model.update(part, strict=False)
        self.step += 1
        return float(loss + other_loss)

    def save(self, file: Path) -> None:
        """Write weights, optimizers and step. An interrupted save leaves the earlier file."""
        arrays = {
            **{f"model.{name}": a for name, a in _flat(self.model.parameters()).items()},
            **{
                f"optimizer.{index}.{name}": a
                for index, optimizer in enumerate(self._optimizers)
                for name, a in _flat(optimizer.state).items()
            },
        }
        unfinished = file.with_suffix(".unfinished.safetensors")
        mx.save_safetensors(str(unfinished), arrays, {"step": str(self.step)})
        unfinished.rename(file)

    def resume(self, file: Path) -> None:
        """Restore the state that `save` has written."""
        arrays, metadata = _load(file)
        self.model.update(_below("model.", arrays))
        for index, optimizer in enumerate(self._optimizers):
            optimizer.state = _below(f"optimizer.{index}.", arrays)
        self.step = int(metadata["step"])
        mx.eval(self.model.parameters(), [optimizer.state for optimizer in self._optimizers])

    def _parts(self) -> list[Any]:
        return _parts(self.model.trainable_parameters())


class Helper:
    """Computes gradients on a thread of its own, with a model of its own to trace."""

    _tracing = Lock()  # MLX traces one function at a time

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._model = _model(config)
        self._gradient = mx.value_and_grad(self._loss)

    def gradients(self, parameters: Any, batch: Batch, total: int) -> tuple[float, Any]:
        """The batch's share of the mean loss over `total` tokens, and of its gradients."""
        with self._tracing:
            loss, gradients = self._gradient(parameters, batch, total)
        mx.eval(loss, gradients)
        return float(cast(float, loss.item())), gradients

    def _loss(self, parameters: Any, batch: Batch, total: int) -> mx.array:
        self._model.update(parameters)
        hidden = hidden_states(self._model, batch.ids)
        hidden = hidden.reshape(-1, hidden.shape[-1])[batch.said]
        logits = self._model.model.embed_tokens.as_linear(hidden)
        return nn.losses.cross_entropy(logits, batch.targets, reduction="sum") / total


def _model(config: Mapping[str, Any]) -> Model:
    """A model of random weights, evaluated: threads cannot share arrays that are not evaluated."""
    model = Model(ModelArgs.from_dict(dict(config)))
    mx.eval(model.parameters())
    return model


def batches(
    tokenizer: PreTrainedTokenizerFast, words: Words, stages: Stages, seed: int, first: int
) -> Iterator[Sequence[Batch]]:
    """Yield pairs of batches without end, from step `first` on. They depend on the seed alone."""
    step, pool = 0, 0
    while True:
        rng = random.Random(f"{seed}/{pool}")
        for rows in _pool(tokenizer, shares_at(stages, step), words, rng):
            if step >= first:
                yield [batch(rows[0::2]), batch(rows[1::2])]
            step += 1
        pool += 1


def batch(samples: Sequence[Sample]) -> Batch:
    """The samples as rows of one batch."""
    length = max(len(one.ids) for one in samples)
    ids = np.zeros((len(samples), length), np.int32)
    said: list[int] = []
    targets: list[int] = []
    for row, one in enumerate(samples):
        ids[row, : len(one.ids)] = one.ids
        said += [row * length + index - 1 for index in one.said]
        targets += [one.ids[index] for index in one.said]
    return Batch(mx.array(ids), mx.array(said), mx.array(targets))


def _optimizer(rates: Rates) -> optim.MultiOptimizer:
    """Muon for the matrices, AdamW for the embedding and the norms."""
    return optim.MultiOptimizer(
        [
            optim.Muon(rates.of(rates.muon), weight_decay=0),
            optim.AdamW(rates.of(rates.adam), betas=[0.9, 0.98], weight_decay=0.05),
        ],
        [lambda name, weight: weight.ndim == 2 and "embed" not in name],
    )


def _updated(optimizer: optim.MultiOptimizer, gradients: Any, parameters: Any) -> Any:
    """The parameters after a step, computed on this thread."""
    updated = optimizer.apply_gradients(gradients, parameters)
    mx.eval(updated, optimizer.state)
    return updated


def _parts(tree: Any) -> list[Any]:
    """The tree in as many parts as there are threads, of about equal work."""
    named = sorted(_flat(tree).items())
    return [tree_unflatten(named[index::_THREADS]) for index in range(_THREADS)]


def _pool(
    tokenizer: PreTrainedTokenizerFast, shares: Shares, words: Words, rng: random.Random
) -> list[list[Sample]]:
    """The batches of one pool of conversations, in random order."""
    samples = [sample(tokenizer, one) for one in islice(conversations(shares, words, rng), _POOL)]
    samples.sort(key=lambda one: len(one.ids))
    pooled: list[list[Sample]] = []
    rows: list[Sample] = []
    for one in samples:
        rows.append(one)
        if len(rows) * len(one.ids) >= BATCH_TOKENS:
            pooled.append(rows)
            rows = []
    rng.shuffle(pooled)
    if shares is COPYING:
        return pooled
    for place in range(_LONG_EVERY // 2, len(pooled), _LONG_EVERY):
        pooled.insert(place, _long(tokenizer, words, rng))
    return pooled


def _long(tokenizer: PreTrainedTokenizerFast, words: Words, rng: random.Random) -> list[Sample]:
    """Conversations, at least two, of one length, which may be the whole context."""
    length = rng.choice(_LONG_TOKENS)
    return [_of_length(length, tokenizer, words, rng) for _ in range(max(2, 2048 // length))]


def _of_length(
    length: int, tokenizer: PreTrainedTokenizerFast, words: Words, rng: random.Random
) -> Sample:
    exchanges = 4
    longest = sample(tokenizer, conversation(1, ALL, words, rng))
    while True:
        candidate = sample(tokenizer, conversation(exchanges, ALL, words, rng))
        if len(candidate.ids) > length:
            return longest
        longest = candidate
        exchanges += 1 + exchanges // 4


def _flat(tree: Any) -> dict[str, mx.array]:
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(tree)))


def _load(file: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    loaded = mx.load(str(file), return_metadata=True)
    return cast(tuple[dict[str, mx.array], dict[str, str]], loaded)


def _below(prefix: str, arrays: Mapping[str, mx.array]) -> Any:
    return tree_unflatten(
        [(name.removeprefix(prefix), a) for name, a in arrays.items() if name.startswith(prefix)]
    )
