"""Logits of some tokens alone are those that the model has for them anyway."""

import mlx.core as mx
import pytest
from mlx.nn.layers.quantized import quantize

from engine.mlx_backend.model.patches import install_output_head
from measuring.random_checkpoint import random_model

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,  # as many as tokens: other projections look like the last one
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "attention_bias": False,
}


@pytest.mark.parametrize("tied", [False, True])
def test_only_what_is_read_is_projected(tied: bool) -> None:
    model = random_model({**CONFIG, "tie_word_embeddings": tied}, 0, mx.float32)
    tokens = mx.array([[3, 1, 4, 1], [5, 9, 2, 6]])
    before = model(tokens)
    head = install_output_head(model, 64)
    assert mx.array_equal(model(tokens), before)
    with head.reading(mx.array([6, 1])):
        found = model(tokens)
    assert found.shape == (2, 1, 64)
    assert mx.allclose(found[:, 0], mx.stack([before[1, 2], before[0, 1]]), atol=1e-5)
    assert mx.array_equal(model(tokens), before), "and afterwards all are"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_hidden_states_and_rows_make_the_logits(tied: bool, bits: int | None) -> None:
    """Of some tokens, or of all; quantized weights, too."""
    model = random_model({**CONFIG, "tie_word_embeddings": tied}, 0, mx.float32)
    if bits is not None:
        quantize(model, 32, bits)
    tokens = mx.array([[3, 1, 4, 1], [5, 9, 2, 6]])
    expected = model.model(tokens)
    head = install_output_head(model, 64)
    assert head.dimensions == CONFIG["hidden_size"]
    with head.reading(None) as whole:
        logits = model(tokens)
    with head.reading(mx.array([6, 1])) as some:
        model(tokens)
    assert whole.hidden is not None
    assert some.hidden is not None
    assert mx.allclose(whole.hidden, expected, atol=1e-5)
    assert mx.allclose(some.hidden[:, 0], mx.stack([expected[1, 2], expected[0, 1]]), atol=1e-5)
    assert mx.allclose(whole.hidden @ head.rows([7, 0, 63]).T, logits[..., [7, 0, 63]], atol=1e-3)


def test_a_failing_forward_leaves_nothing_behind() -> None:
    model = random_model({**CONFIG, "tie_word_embeddings": False}, 0, mx.float32)
    head = install_output_head(model, 64)
    with pytest.raises(ZeroDivisionError), head.reading(mx.array([0])):
        _ = 1 / 0
    assert model(mx.array([[3, 1, 4]])).shape == (1, 3, 64)
