"""How far a model has come that is being fetched or loaded."""

from unittest.mock import AsyncMock

import pytest

from server.generation.models import Naming
from server.models import KnownModel, LoadedModel
from server.pool.pooled_model import PooledModel
from server.pool.states import Measuring, State
from server.routes.admin_models import progress_share
from server.settings.models import ModelSettings
from tests.contract.fake_engine import CARD

BEGAN, TOOK = 100.0, 20.0


@pytest.fixture
def known() -> KnownModel:
    return KnownModel(ModelSettings(), [Naming("demo", "demo")], {})


@pytest.fixture
def model() -> PooledModel[LoadedModel]:
    model = PooledModel[LoadedModel](AsyncMock(), AsyncMock())
    model.set(load_seconds=TOOK)
    return model


def test_of_a_repository_it_is_what_has_been_fetched(
    known: KnownModel, model: PooledModel[LoadedModel]
) -> None:
    model.set(measuring=Measuring.RUNS)
    assert model.is_coming
    assert progress_share(known, model, BEGAN) is None
    known.fetching(1_250_000_000, 5_000_000_000)
    assert progress_share(known, model, BEGAN) == 0.25
    assert known.progress == "1.25 of 5.00 GB fetched"
    known.fetching(10, 0)
    assert progress_share(known, model, BEGAN) is None


def test_of_loading_it_is_the_time_that_it_took_before(
    known: KnownModel, model: PooledModel[LoadedModel]
) -> None:
    model.set(state=State.LOADING, began_at=BEGAN)
    assert model.is_coming
    assert progress_share(known, model, BEGAN + 5) is None
    known.card = CARD
    assert progress_share(known, model, BEGAN + 5) == 0.25
    assert progress_share(known, model, BEGAN + TOOK) is None
    model.set(state=State.READY)
    assert not model.is_coming
