"""Every architecture in half precision, as it is on GPUs: what its layers keep is found out.

Nothing is evaluated, so it takes seconds and says nothing of what a GPU computes.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.utils import tree_unflatten

from engine.mlx_backend.kv.layout import discover
from engine.mlx_backend.loading.weights import named_weights
from engine.mlx_backend.model.plain_kernels import install_plain_kernels
from measuring.random_checkpoint import CONFIGS, random_model
from tests.conformance import document
from tests.conformance.cases import CASES

REFUSED = {"olmo"}
"""Before they run: a fault of mlx-lm's."""

NOT_CAUSAL = {"phi3small"}


def half(config: Mapping[str, Any]) -> Module:
    """All weights in bfloat16."""
    model = random_model(config, 0, mx.bfloat16)
    install_plain_kernels(model)
    return model


def half_but_norms(config: Mapping[str, Any]) -> Module:
    """As some checkpoints are: the weights of norms in float32."""
    model = half(config)
    norms = {name: array for name, array in named_weights(model).items() if "norm" in name}
    wide = [
        (name, array.astype(mx.float32))
        for name, array in norms.items()
        if mx.issubdtype(array.dtype, mx.floating)
    ]
    model.update(tree_unflatten(wide))
    return model


def test_half_precision_is_discovered_in_every_architecture() -> None:
    names = sorted(CONFIGS.keys() - REFUSED)
    found = {name: discover(half(CONFIGS[name])).dtypes for name in names}
    assert {name: dtypes for name, dtypes in found.items() if dtypes != (mx.bfloat16,)} == {}


@pytest.mark.parametrize("name", ["exaone4", "olmo2", "olmo3"])
def test_keys_and_values_may_differ(name: str) -> None:
    first, *rest = discover(half_but_norms(CONFIGS[name])).kv_layers
    assert (first.key_dtype, first.value_dtype) == (mx.float32, mx.bfloat16)
    assert {(shape.key_dtype, shape.value_dtype) for shape in rest} == {(mx.float32, mx.float32)}


def test_the_document_has_every_checkpoint() -> None:
    served = document.served_column(document.PATH.read_text("utf-8"))
    assert served.keys() == CASES.keys()
    assert {name for name, is_served in served.items() if not is_served} == REFUSED | NOT_CAUSAL
