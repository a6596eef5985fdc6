"""How far a model has come that is being fetched or loaded."""

import logging

import pytest

from server.models.model import PROGRESS_SECONDS, Model
from server.models.policy import Loading, Need, Unknown
from server.settings.models import ModelSettings
from tests.contract.fake_engine import CARD

BEGAN, TOOK = 100.0, 20.0


@pytest.fixture
def model() -> Model:
    return Model(ModelSettings(served_model_name=("demo",)))


def test_of_a_repository_it_is_what_has_been_fetched(model: Model) -> None:
    assert model.begin_measuring()
    assert model.is_coming
    assert model.progress_share(BEGAN) is None
    model.report_fetched(1_250_000_000, 5_000_000_000)
    assert model.progress_share(BEGAN) == 0.25
    assert model.progress == "1.25 of 5.00 GB fetched"
    model.report_fetched(10, 0)
    assert model.progress_share(BEGAN) is None


def test_of_loading_it_is_the_time_that_it_took_before(model: Model) -> None:
    model.become(Loading(Need(60, load_seconds=TOOK), BEGAN))
    assert model.is_coming
    assert model.progress_share(BEGAN + 5) is None
    model.card = CARD
    assert model.progress_share(BEGAN + 5) == 0.25
    assert model.progress_share(BEGAN + TOOK) is None
    model.become(Unknown())
    assert not model.is_coming


def test_what_is_being_done_is_logged_if_nothing_else_is_for_a_while(
    model: Model, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    seconds = 1000.0
    monkeypatch.setattr("server.models.model.time.monotonic", lambda: seconds)
    model.report("model /models/demo")
    seconds += 1
    model.report("loading weights, 40.0 GiB…")
    assert model.progress == "loading weights, 40.0 GiB…"
    seconds += PROGRESS_SECONDS
    for _ in range(2):
        model.report("loading weights, 3.0 of 40.0 GiB…")
    model.report("weights: 40.0 GiB")
    assert caplog.messages == [
        "demo: model /models/demo",
        "demo: loading weights, 3.0 of 40.0 GiB…",
        "demo: weights: 40.0 GiB",
    ]
