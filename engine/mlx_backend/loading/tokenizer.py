"""The tokenizer of a checkpoint, as mlx-lm loads it, and what the server must know to use it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_lm import utils
from mlx_lm.tokenizer_utils import TokenizerWrapper

from engine.api import ModelError
from engine.mlx_backend.errors import one_line
from engine.values.model import TemplateKind


def load_tokenizer(
    checkpoint: Path, config: Mapping[str, Any], vocab_size: int
) -> TokenizerWrapper:
    """Raises ModelError where it cannot be loaded or is not the model's."""
    try:
        end_tokens = _end_tokens(config, vocab_size)
        tokenizer = utils.load_tokenizer(checkpoint, eos_token_ids=end_tokens)
    except Exception as error:
        raise ModelError(f"cannot load its tokenizer: {one_line(error)}") from error
    _check_vocabulary(tokenizer, vocab_size)
    return tokenizer


def template_kind(tokenizer: TokenizerWrapper, source: str = "") -> TemplateKind:
    """How the tokenizer's chat template is rendered, or `source` in its place."""
    if source:
        return TemplateKind(source=source)
    function = tokenizer._chat_template
    return TemplateKind(
        module="" if function is None else function.__module__.rpartition(".")[2],
        thinking_argument=tokenizer._thinking_kwarg,
        thinks=tokenizer.has_thinking,
    )


def _end_tokens(config: Mapping[str, Any], vocab_size: int) -> list[int] | None:
    """Of generation_config.json, which mlx-lm prefers, or else of config.json.

    None where they name none of the model's tokens: mlx-lm knows those of some tokenizers.
    """
    named = config.get("eos_token_id")
    listed = named if isinstance(named, list) else [named]
    return [id for id in listed if isinstance(id, int) and 0 <= id < vocab_size] or None


def _check_vocabulary(wrapper: TokenizerWrapper, vocab_size: int) -> None:
    """Raise ModelError unless the tokenizer's tokens are some of a model's `vocab_size`.

    Added tokens may lie beyond: Gemma's for images, say, in a model of text alone.
    """
    if not wrapper.is_fast:
        raise ModelError("the checkpoint has no tokenizer.json, nor what one could be made of")
    backend = wrapper.backend_tokenizer
    added = backend.get_added_tokens_decoder()
    ordinary = backend.get_vocab(with_added_tokens=False).values() - added.keys()
    if not ordinary:
        raise ModelError("the tokenizer has no tokens")
    if max(ordinary) >= vocab_size:
        raise ModelError(
            f"the tokenizer is not the model's: its tokens go up to {max(ordinary):,}, and the "
            f"model has {vocab_size:,}"
        )
