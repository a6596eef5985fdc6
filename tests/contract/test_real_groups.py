"""Daemons of models that keep windows and states: prefixes are shared, and the storage is shown."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.api import ModelError
from engine.values.settings import EngineConfig
from server.settings import Settings
from tests.checkpoints import FAMILIES, write_family
from tests.contract.daemon import running
from tests.hosting import loaded
from tests.polling import until

pytestmark = pytest.mark.process

MAX_RUNNING = 4
STEP_TOKENS = 16


def config_for(model: Path, kv_cache_bytes: int = 4 << 20) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        kv_cache_bytes=kv_cache_bytes,
        block_size=8,
        max_running=MAX_RUNNING,
        step_tokens=STEP_TOKENS,
    )


@pytest.fixture(scope="module", params=["gemma3_text", "qwen3_next", "rwkv7", "recurrent_gemma"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = write_family(FAMILIES[request.param], tmp_path_factory.mktemp("models"))
    engine = loaded(config_for(model))
    settings = Settings(port=0, model=str(model), served_model_name=("tiny",))
    with running(engine, settings) as daemon_url:
        yield daemon_url


def test_a_resend_is_cached_but_for_one_token_and_says_the_same(url: str) -> None:
    body = {"model": "tiny", "prompt": list(range(5, 65)), "max_tokens": 12, "temperature": 0}
    cold, warm = (
        httpx.post(f"{url}/v1/completions", json=body | {"ignore_eos": True}).json()
        for _ in range(2)
    )
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 59
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]


def test_what_each_group_holds_is_shown_in_both_places(url: str) -> None:
    def read() -> list[dict[str, Any]]:
        return list(httpx.get(f"{url}/admin/cache/stats").json()["groups"])

    until(lambda: not any(group["held"] for group in read()))  # once answers end
    groups = read()
    assert groups
    shown = {
        (sample.labels["group"], sample.labels["state"]): sample.value
        for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
        if family.name == "rootstock_group_slots"
        for sample in family.samples
    }
    for group in groups:
        assert group["free"] + group["cached"] + group["held"] == group["total"]
        assert group["held"] == 0
        assert shown[group["name"], "cached"] == group["cached"] > 0
        assert shown[group["name"], "free"] == group["free"]


def test_what_went_and_what_was_found_in_vain_is_counted_by_group(url: str) -> None:
    groups = httpx.get(f"{url}/admin/cache/stats").json()["groups"]
    families = {
        family.name: {sample.labels["group"]: sample.value for sample in family.samples}
        for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
        if family.name.startswith("rootstock_group_") and family.type == "counter"
    }
    assert families == {
        "rootstock_group_evicted_slots": {g["name"]: g["evictions"] for g in groups},
        "rootstock_group_unresumable_tokens": {g["name"]: g["unresumable_tokens"] for g in groups},
    }


@pytest.mark.slow
def test_too_little_memory_for_one_window_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    model = write_family(FAMILIES["gemma3_text"], tmp_path)
    with pytest.raises(ModelError, match=r"need at least [\d,]+; raise kv_cache_bytes") as refusal:
        loaded(config_for(model, kv_cache_bytes=1000))
    needed = int(str(refusal.value).split("at least ")[1].split(";")[0].replace(",", ""))
    engine = loaded(config_for(model, needed))
    assert engine.card.arena_tokens == MAX_RUNNING * 8
    asyncio.run(engine.drain(1.0))
