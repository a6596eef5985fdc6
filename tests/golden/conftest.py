"""Checkpoints and models for the golden tests, made once per session."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from mlx.nn.layers.base import Module
from mlx_lm.utils import load_model

from engine.mlx_backend.attention import dispatch
from engine.mlx_backend.attention.cascade import CascadeAttention
from engine.mlx_backend.attention.gather import GatherAttention
from engine.mlx_backend.attention.strategy import Attention
from engine.mlx_backend.loader import LoadedModel, load_weights, open_model
from tests.checkpoints import FAMILIES, write_family

ATTENTION: dict[str, Callable[[], Attention]] = {
    "gather": GatherAttention,
    "cascade": lambda: CascadeAttention(min_saved_blocks=1),
}


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint directory of a family."""
    parent = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda family: write_family(FAMILIES[family], parent))


@pytest.fixture(scope="session")
def loaded_of(checkpoint_of: Callable[[str], Path]) -> Callable[[str], LoadedModel]:
    """A family's model as the daemon loads it."""

    @cache
    def load(family: str) -> LoadedModel:
        loaded = open_model(checkpoint_of(family), memory_bytes=1 << 30)
        load_weights(loaded, lambda line: None)
        dispatch.install(loaded.model)
        return loaded

    return load


@pytest.fixture(scope="session")
def peer_of(checkpoint_of: Callable[[str], Path]) -> Callable[[str], Module]:
    """A family's model as mlx-lm loads it, quantized weights and all."""
    return cache(lambda family: load_model(checkpoint_of(family))[0])


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def loaded(family: str, loaded_of: Callable[[str], LoadedModel]) -> LoadedModel:
    return loaded_of(family)


@pytest.fixture
def peer(family: str, peer_of: Callable[[str], Module]) -> Module:
    return peer_of(family)


@pytest.fixture(params=sorted(ATTENTION))
def attention(request: pytest.FixtureRequest) -> Attention:
    return ATTENTION[request.param]()
