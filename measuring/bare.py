"""mlx-lm's model with mlx-lm's own caches and no engine: the baseline for the engine's steps."""

import time
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import load_model

_PREFILL_TOKENS = 512


class BareModel:
    """One batch of rows of equal length, decoded greedily, without sharing.

    A step is the forward of one token a row, the argmax over its logits, and the evaluation of
    both: the tokens are known when it returns. The model may be one that an engine serves at the
    same time: with mlx-lm's caches it computes what it computed before.
    """

    def __init__(self, model: Module, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._cache: list[KVCache] = []
        self._tokens = mx.zeros((0,), dtype=mx.int32)

    def begin(self, rows: int, context_tokens: int, seed: int = 0) -> None:
        """Replace the batch: compute prompts of random tokens, `[rows, context_tokens]`."""
        prompts = np.random.default_rng(seed).integers(0, self._vocab_size, (rows, context_tokens))
        self._cache = make_prompt_cache(self._model)
        self._tokens = mx.array(prompts[:, -1].astype(np.int32))
        starts = range(_PREFILL_TOKENS, context_tokens - 1, _PREFILL_TOKENS)
        for chunk in np.split(prompts[:, :-1], starts, axis=1):
            self._prefill(chunk)

    def step_seconds(self) -> float:
        """Decode one token for each row."""
        start = time.perf_counter()
        logits = self._model(self._tokens[:, None], cache=self._cache)
        self._tokens = mx.argmax(logits[:, -1], axis=-1)
        mx.eval(self._tokens)
        return time.perf_counter() - start

    def prefill_seconds(self, n_tokens: int) -> float:
        """Compute `n_tokens` more tokens of each row."""
        tokens = np.zeros((self._tokens.shape[0], n_tokens), dtype=np.int32)
        start = time.perf_counter()
        self._prefill(tokens)
        return time.perf_counter() - start

    def _prefill(self, tokens: np.ndarray) -> None:
        self._model(mx.array(tokens.astype(np.int32)), cache=self._cache)
        mx.eval([layer.state for layer in self._cache])


def load_bare(checkpoint: Path) -> BareModel:
    """Load as mlx-lm does: in the checkpoint's own dtype."""
    model, config = load_model(checkpoint)
    return BareModel(model, int(config["vocab_size"]))
