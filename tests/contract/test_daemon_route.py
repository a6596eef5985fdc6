"""`GET /admin/daemon`, and what the page is told of agents."""

from dataclasses import asdict, replace
from pathlib import Path

import httpx
from pydantic import SecretStr

from engine.values.model import ModelCard, Place, facts_of
from server.admin_schema import fact_lines
from server.settings import Settings, load_settings
from server.terminal.agents import AGENTS
from tests.contract.access.helpers import bearer, client_of, key_file, secret_of
from tests.contract.daemon import running
from tests.contract.fake_engine import CARD, FakeEngine
from tests.contract.metrics import metric_families

SECRET = "sk-of-the-operator"


def test_it_tells_the_model_and_what_memory_it_takes(http: httpx.Client) -> None:
    told = http.get("/admin/daemon").json()
    assert told["names"] == [CARD.name]
    assert told["model"]["dtype"] == CARD.dtype
    assert told["model"]["max_context_tokens"] == CARD.max_context_tokens
    assert told["model"]["max_sequence_tokens"] == CARD.max_sequence_tokens
    assert told["memory"] == http.get("/admin/cache/stats").json()["memory"]


def test_the_facts_of_the_card_are_in_each_of_their_places() -> None:
    card = replace(CARD, kv_format="q8", kv_divergence=0.001, batching="padded rows")
    with (
        running(FakeEngine(card=card), Settings(port=0)) as url,
        httpx.Client(base_url=url) as http,
    ):
        told = http.get("/admin/daemon").json()
        model = http.get(f"/v1/models/{card.name}").json()
        families = metric_families(http.get("/metrics").text)
    facts, values = facts_of(ModelCard), asdict(card)
    assert told["model"] == {
        **{name: values[name] for name in facts},
        "max_sequence_tokens": card.max_sequence_tokens,
    }
    description = facts["batching"].description
    assert {"label": "batching", "text": card.batching, "description": description} in told["facts"]
    listed = facts_of(ModelCard, Place.MODELS)
    assert "kv_format" in listed
    assert {name: model[name] for name in listed} == {name: values[name] for name in listed}
    (info,) = families["rootstock_model_info"].samples
    labels = {name: str(values[name]) for name in facts_of(ModelCard, Place.METRIC)}
    assert labels.keys() >= {"fingerprint", "device", "dtype", "kv_format"}
    assert info.labels == {"model": card.name, "model_name": card.name} | labels


def test_facts_without_a_value_have_no_line() -> None:
    assert [line.text for line in fact_lines(replace(CARD, batching="padded rows"))] == [
        "padded rows"
    ]
    assert list(fact_lines(replace(CARD, batching=""))) == []


def test_it_tells_every_setting_and_which_were_changed() -> None:
    given = {"port": 0, "step_tokens": 64, "cors_origin": ("app://*",)}
    with running(FakeEngine(), load_settings(given)) as url:
        settings = httpx.get(f"{url}/admin/daemon").json()["settings"]
    assert {setting["name"] for setting in settings} == set(Settings.model_fields)
    assert all(setting["description"] for setting in settings)
    changed = {each["name"]: each["value"] for each in settings if not each["is_default"]}
    assert changed == given | {"cors_origin": ["app://*"]}


def test_no_key_is_ever_told(tmp_path: Path) -> None:
    keys = key_file(tmp_path, ann={"role": "admin"})
    settings = Settings(port=0, api_key=SecretStr(SECRET), api_keys_file=keys)
    with running(FakeEngine(), settings) as url:
        text = httpx.get(f"{url}/admin/daemon", headers=bearer(SECRET)).raise_for_status().text
    assert '"name":"api_key","value":"**********","is_default":false' in text
    for secret in (SECRET, secret_of("ann"), keys.read_text().split("sha256: ")[1].split()[0]):
        assert secret not in text


def test_agents_are_those_that_launch_knows_and_no_secret(tmp_path: Path) -> None:
    with running(FakeEngine(), Settings(port=0, api_keys_file=key_file(tmp_path, bob={}))) as url:
        launch = httpx.get(f"{url}/dashboard/agents").json()
        assert [agent["name"] for agent in launch["agents"]] == list(AGENTS)
        assert {"name": "claude", "context_tokens": 26_000, "calls_tools": True} in launch["agents"]
        assert {"name": "aider", "context_tokens": 5_000, "calls_tools": False} in launch["agents"]
        with client_of(url, "bob") as bob:
            assert bob.get("/admin/daemon").status_code == 403
