"""A checkpoint that writes exact texts: its next token depends on its position alone.

It is GPT-2 of one layer, whose attention and MLP are zero. The embedding of each position points to
the token that is written there. A prompt begins with as many tokens as lead to the script that its
user's message names, so one checkpoint has several scripts.
"""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from tokenizers import AddedToken

from measuring.random_checkpoint import CONFIGS, tiny_tokenizer, write_checkpoint

SCRIPT_POSITIONS = 512
"""Of each script: its prompt's end, and its text."""

_WIDTH = 64
_STOP = "<|im_end|>"
_POSITION_WEIGHT = 100.0
_TEMPLATE = (
    "{%%- set script = (messages | selectattr('role', 'equalto', 'user') | list)[0].content %%}"
    "{{- 'a' * (%d * (script | int)) }}"
    "{%%- if add_generation_prompt %%}{{- %r }}{%%- endif %%}"
)


def write_scripted(
    directory: Path,
    scripts: Sequence[str],
    *,
    opened: str = "",
    added: Sequence[str] = (),
    special: Sequence[str] = (),
) -> Path:
    """Write a checkpoint that answers the user's message "0" with the first of the scripts, "1"
    with the second, and so on. Its prompts end with `opened`.

    `added` and `special` are added tokens, with text and as special tokens. A script that holds
    their text writes them.
    """
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    n_tokens, n_positions = tokenizer.get_vocab_size(), SCRIPT_POSITIONS * len(scripts)
    config = {
        **CONFIGS["gpt2"],
        "n_layer": 1,
        "n_embd": _WIDTH,
        "vocab_size": n_tokens,
        **dict.fromkeys(("n_ctx", "n_positions", "max_position_embeddings"), n_positions),
    }
    prompt_end = "\n" + opened
    template = _TEMPLATE % (SCRIPT_POSITIONS, prompt_end)
    write_checkpoint(directory, config, 0, tokenizer, mx.float32, chat_template=template)
    written = list[int]()
    stop = tokenizer.token_to_id(_STOP)
    assert stop is not None
    for number, script in enumerate(scripts):
        begin = len(tokenizer.encode("a" * SCRIPT_POSITIONS * number + prompt_end).ids)
        written += [stop] * (begin - 1 - len(written))
        written += tokenizer.encode(script).ids
        assert len(written) < SCRIPT_POSITIONS * (number + 1), f"too long: {script[:80]}"
    written += [stop] * (n_positions - len(written))
    file = str(directory / "model.safetensors")
    weights = {name: array * 0 for name, array in _loaded(file).items()}
    vectors = mx.random.normal((n_tokens, _WIDTH), key=mx.random.key(0))
    vectors = vectors - vectors.mean(axis=1, keepdims=True)
    vectors = vectors / mx.linalg.norm(vectors, axis=1, keepdims=True)
    weights["model.wte.weight"] = vectors
    weights["model.wpe.weight"] = vectors[mx.array(written)] * _POSITION_WEIGHT
    for norm in ("model.ln_f", "model.h.0.ln_1", "model.h.0.ln_2"):
        weights[f"{norm}.weight"] = mx.ones(_WIDTH)
    mx.save_safetensors(file, weights, {"format": "mlx"})
    return directory


def _loaded(file: str) -> dict[str, mx.array]:
    weights = mx.load(file)
    assert isinstance(weights, dict)
    mx.eval(weights)
    return weights
