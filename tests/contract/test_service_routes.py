"""Models, health, metrics and admin."""

import re
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from anyio import fail_after, to_thread

import server
from engine.values.model import ModelCard, Place, facts_of
from engine.values.stats import CacheTier, Histogram, Latency
from server.app import create_app
from server.pressure.guard import MemoryGuard
from server.settings import Settings
from tests.contract.conftest import ChatBody
from tests.contract.daemon import registry_of, running, serving
from tests.contract.fake_engine import CARD, DECODE, DISK, FakeEngine, Gate, Script, observed
from tests.contract.metrics import metric_families, value
from tests.contract.pressure import ScriptedSources
from tests.contract.scripted import CLIENT_SECONDS, StrictClient
from tests.polling import WAIT_SECONDS, until

ROOT = Path(__file__).parents[2]
METRIC = re.compile(r"rootstock_(?!serve\b)\w+")  # and no package
NAMES_METRICS = ("docs/*.md", "configs/grafana-dashboard.json", "configs/prometheus/alerts.yml")


pytestmark = pytest.mark.usefixtures("engine")  # each test starts from the default script


def test_models(client: StrictClient, http: httpx.Client) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id) == model
    assert "/" in model.id
    assert set(http.get("/v1/models").json()["data"][0]) == {
        *("id", "object", "created", "owned_by", "sampling_defaults", "max_model_len"),
        *("root", "parent", "tasks", "tools", "tool_format", "template_traits", "state"),
        *("kv_format", "images"),
        *("type", "display_name", "created_at", "lifecycle", "max_input_tokens", "max_tokens"),
        *facts_of(ModelCard, Place.MODELS),
    }
    assert http.get("/v1/models/no/such").json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("arena_tokens", [100, 4096])
def test_a_model_is_as_long_as_context_and_cache_allow(arena_tokens: int) -> None:
    engine = FakeEngine(card=replace(CARD, arena_tokens=arena_tokens))
    longest = min(arena_tokens, CARD.max_context_tokens)
    with running(engine, Settings(port=0)) as url, httpx.Client(base_url=url) as http:
        (model,) = http.get("/v1/models").json()["data"]
        assert model["max_model_len"] == longest
        body = {"prompt": [97] * longest, "max_tokens": 0}
        assert http.post("/v1/completions", json=body).status_code == 200
        body["prompt"] = [97] * (longest + 1)
        assert http.post("/v1/completions", json=body).status_code == 400


def test_the_version(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": server.__version__}


def test_a_model_answers_to_each_of_its_names() -> None:
    with running(FakeEngine(), Settings(port=0, served_model_name=("mine", "gpt-4"))) as base_url:
        listed = httpx.get(f"{base_url}/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["mine", "gpt-4"]
        assert [_answering(base_url, name) for name in ("", "mine", "gpt-4")] == [
            *("mine", "mine", "gpt-4")
        ]
        refused = httpx.post(f"{base_url}/v1/completions", json={"model": "other", "prompt": "x"})
        assert "'mine', 'gpt-4'" in refused.json()["error"]["message"]


def _answering(base_url: str, name: str) -> str:
    """The name under which an answer comes."""
    body = {"model": name, "prompt": "x"}
    return str(httpx.post(f"{base_url}/v1/completions", json=body).json()["model"])


def test_health_follows_the_engine(http: httpx.Client, engine: FakeEngine) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    engine.script = Script(dead=True)
    answer = http.get("/health")
    assert http.head("/health").status_code == answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_stopped"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n_contradictions": 2}, "contradicts itself"),
        (
            {"disk": replace(DISK, ended_threads=("disk-writer",))},
            "threads of the disk cache have ended: disk-writer",
        ),
        (
            {"disk": replace(DISK, write_fault="no_space", is_day_spent=True)},
            "the disk cache cannot be written: no_space",
        ),
    ],
    ids=["contradictions", "threads", "writes"],
)
def test_health_says_what_is_broken_while_all_requests_are_answered(
    fields: dict[str, Any], reason: str
) -> None:
    """A router goes on asking here."""
    with running(FakeEngine(**fields), Settings(port=0)) as url:
        answer = httpx.get(f"{url}/health")
        metrics = httpx.get(f"{url}/metrics").text
        stats = httpx.get(f"{url}/admin/cache/stats").json()
    assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
    assert reason in answer.json()["reason"]
    broken = replace(FakeEngine(), **fields)
    n_contradictions = value(metrics, "rootstock_kv_contradictions_total", model="test/bytes")
    assert n_contradictions == broken.n_contradictions
    assert broken.disk is not None
    assert value(metrics, "rootstock_disk_day_spent") == broken.disk.is_day_spent
    assert stats["disk"]["ended_threads"] == list(broken.disk.ended_threads)


def test_alarms_say_what_is_wrong_and_what_to_do() -> None:
    engine = FakeEngine(
        card=replace(CARD, slowdowns=("Steps take longer. Report the model.",)),
        n_contradictions=1,
        disk=replace(DISK, write_fault="no_space", is_day_spent=True, ended_threads=("reader",)),
        decode=replace(
            DECODE,
            problem="building its kernels ended with signal 9",
            attention_problem="RuntimeError: no such kernel",
            attention_fallbacks=3,
        ),
    )
    with running(engine, Settings(port=0)) as url:
        (model,) = httpx.get(f"{url}/admin/models").json()["models"]
        metrics = httpx.get(f"{url}/metrics").text
    assert value(metrics, "rootstock_attention_fallbacks_total", model="test/bytes") == 3
    recount, threads, write, day, steps, decode, attention = model["alarms"]
    assert recount.startswith("The KV store contradicts itself")
    assert threads == "Threads of the disk cache have ended: reader. Start the daemon again."
    assert write.endswith("no_space. Free some of the disk, or lower disk_cache_bytes.")
    assert "disk_cache_daily_bytes" in day
    assert steps == "Steps take longer. Report the model."
    assert "signal 9" in decode
    assert decode.endswith("to try again.")
    assert "no such kernel" in attention
    assert attention.endswith(
        "`rootstock doctor --measure --model NAME` compares attentions again."
    )


def test_a_sound_model_has_no_alarm_and_one_that_nobody_pinned_is_not_pinned() -> None:
    with running(FakeEngine(), Settings(port=0)) as url:
        (model,) = httpx.get(f"{url}/admin/models").json()["models"]
    assert model["alarms"] == []
    assert not model["pinned"]
    with running(FakeEngine(), Settings(port=0, pinned=True)) as url:
        (model,) = httpx.get(f"{url}/admin/models").json()["models"]
    assert model["pinned"]


@pytest.mark.parametrize(
    "path",
    [
        *("/health", "/load", "/metrics", "/openapi.json", "/version"),
        *("/v1/models", "/v1/models/test/bytes"),
        *("/admin/cache/stats", "/admin/cache/tree", "/admin/requests"),
        *("/", "/docs", "/dashboard/docs/index.html"),
    ],
)
def test_head_is_get_without_the_body(http: httpx.Client, path: str) -> None:
    head, get = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert int(head.headers["content-length"]) > 0
    if path == "/health":  # which leaves out what is null
        assert int(head.headers["content-length"]) == len(get.content)


async def test_who_watches_needs_no_worker_thread() -> None:
    """All may be busy with long answers."""
    app = create_app(registry_of(FakeEngine(), Settings()), Settings())
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        workers = to_thread.current_default_thread_limiter()
        workers.total_tokens = 1
        await workers.acquire_on_behalf_of(app)
        with fail_after(WAIT_SECONDS):
            for path in ("/health", "/load", "/metrics", "/version"):
                assert (await client.get(path)).status_code == 200


def test_http_answers_are_counted_by_route() -> None:
    with (
        running(FakeEngine(), Settings(port=0)) as base_url,
        httpx.Client(base_url=base_url, timeout=CLIENT_SECONDS) as http,
    ):
        for path in ("/v1/models/test/bytes", "/v1/models/nothing", "/v1/models/at/all"):
            http.get(path)
        for path in ("/made", "/up", "/admin/made-up"):
            http.get(path)
        http.request("LINK", "/health")  # RFC 2068: parsed, and of no use to anybody here
        http.head("/health")
        http.get("/health")
        http.get("/openapi.json")
        text = http.get("/metrics").text
    counted = {
        (sample.labels["route"], sample.labels["method"], sample.labels["status"]): sample.value
        for sample in metric_families(text)["rootstock_http_requests"].samples
    }
    assert counted == {
        ("/v1/models/{id:path}", "GET", "200"): 1,
        ("/v1/models/{id:path}", "GET", "404"): 2,
        ("other", "GET", "404"): 3,
        ("/health", "other", "405"): 1,
        ("/health", "HEAD", "200"): 1,
        ("/health", "GET", "200"): 1,
        ("/openapi.json", "GET", "200"): 1,
    }


def test_cache_stats_are_all_that_the_engine_counts(http: httpx.Client) -> None:
    stats = http.get("/admin/cache/stats").json()
    total = stats["blocks_free"] + stats["blocks_cached"] + stats["blocks_held"]
    assert total == stats["blocks_total"]
    assert set(stats) == {
        *("block_size", "blocks_total", "blocks_free", "blocks_cached", "blocks_held"),
        *("blocks_pinned", "blocks_shared", "blocks_saved", "saved_bytes", "arena_bytes"),
        *("nodes", "queried_tokens", "warmed_tokens", "hit_tokens", "recent_hits", "evictions"),
        *("tail_hit_tokens", "prefix_copies", "fork_copies", "groups", "disk", "memory"),
    }
    assert stats["recent_hits"] == [
        {"seconds": 60, "queried_tokens": 0, "hit_tokens": 0},
        {"seconds": 300, "queried_tokens": 40, "hit_tokens": 10},
        {"seconds": 900, "queried_tokens": 120, "hit_tokens": 20},
    ]
    disk = stats["disk"]
    assert disk.pop("failures") == {"checksum": 1, "io": 0}
    assert disk.pop("ended_threads") == []
    assert {name: getattr(DISK, name) for name in disk} == disk
    assert len(disk) == 15


def test_the_memory_of_a_model_is_exported_part_by_part(http: httpx.Client) -> None:
    text = http.get("/metrics").text
    memory = http.get("/admin/cache/stats").json()["memory"]
    for kind in ("active", "cached", "peak"):
        assert value(text, "rootstock_mlx_memory_bytes", kind=kind) == memory[kind] > 0
    [listed] = http.get("/admin/models").json()["models"]
    assert listed["memory"] == memory["model"]
    assert value(text, "rootstock_resident_memory_bytes") == listed["memory"]["process_bytes"] > 0
    for part in ("weights", "kv", "states", "workspace"):
        exported = value(text, "rootstock_planned_memory_bytes", part=part)
        assert exported == listed["memory"][f"{part}_bytes"] > 0


def test_without_a_disk_cache_nothing_is_said_of_one() -> None:
    with (
        running(FakeEngine(disk=None), Settings(port=0)) as url,
        httpx.Client(base_url=url) as http,
    ):
        assert http.get("/admin/cache/stats").json()["disk"] is None
        assert "rootstock_disk" not in http.get("/metrics").text


BOTH = frozenset({CacheTier.MEMORY, CacheTier.DISK})


@pytest.mark.parametrize(
    ("query", "cleared", "blocks"),
    [
        ("", BOTH, 20),
        ("?tiers=memory,disk", BOTH, 20),
        ("?tiers=disk&tiers=memory", BOTH, 20),
        ("?tiers=memory", {CacheTier.MEMORY}, 20),
        ("?tiers=disk", {CacheTier.DISK}, 0),
        ("?namespace=0&tiers=disk", {CacheTier.DISK}, 0),
    ],
)
def test_tiers_are_cleared_together_or_alone(
    http: httpx.Client, engine: FakeEngine, query: str, cleared: Set[CacheTier], blocks: int
) -> None:
    answer = http.post(f"/admin/cache/clear{query}")
    assert engine.cleared.get_nowait() == cleared
    assert answer.json()["blocks_freed"] == blocks


@pytest.mark.parametrize("tiers", ["", "tape", "memory,", "memory,tape", "Disk", "disk,disk,disk"])
def test_what_is_no_tier_clears_nothing(http: httpx.Client, engine: FakeEngine, tiers: str) -> None:
    answer = http.post("/admin/cache/clear", params={"tiers": tiers})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"].startswith("tiers")
    assert error["message"].startswith("tiers")
    assert engine.cleared.empty()


def test_probe_foretells_what_a_chat_will_find(http: httpx.Client, chat: ChatBody) -> None:
    body = chat(messages=[{"role": "user", "content": "probe"}])
    http.post("/admin/cache/clear")
    cold = http.post("/admin/cache/probe", json=body).json()
    http.post("/v1/chat/completions", json=body)
    warm = http.post("/admin/cache/probe", json=body).json()
    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    assert cold["cached_tokens"] == 0
    assert warm["prompt_tokens"] == usage["prompt_tokens"]
    assert warm["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
def test_probe_takes_text_and_token_ids(http: httpx.Client, prompt: object) -> None:
    answer = http.post("/admin/cache/probe", json={"prompt": prompt})
    assert answer.json()["prompt_tokens"] == 3


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, {"prompt": [257]}]
)
def test_bad_probes_are_400(http: httpx.Client, body: dict[str, object]) -> None:
    assert http.post("/admin/cache/probe", json=body).status_code == 400


def test_load_is_what_has_not_ended(
    base_url: str, http: httpx.Client, chat: ChatBody, engine: FakeEngine
) -> None:
    gate = Gate()
    engine.script = Script(gate=gate)
    nothing = {"server_load": 0, "running": 0, "waiting": 0}
    until(lambda: http.get("/load").json() == nothing)  # of clients of other tests, which left
    with ThreadPoolExecutor(1) as pool:
        url = f"{base_url}/v1/chat/completions"
        answer = pool.submit(httpx.post, url, json=chat(n=3), timeout=WAIT_SECONDS)
        engine.at_gate.get(timeout=WAIT_SECONDS)
        assert http.get("/load").json()["server_load"] == 3
        gate.open()
        assert answer.result(WAIT_SECONDS).status_code == 200
    assert http.get("/load").json()["server_load"] == 0


def test_admin_of_a_dead_engine(http: httpx.Client, engine: FakeEngine) -> None:
    """What must be asked of it is a 503; what it has published stands."""
    before = http.get("/admin/cache/stats").json()
    engine.script = Script(dead=True)
    assert http.get("/admin/requests").status_code == 503
    assert http.get("/admin/cache/stats").json() == before


def test_metrics_follow_promtools_rules(http: httpx.Client) -> None:
    http.get("/health")  # answers are counted once they are over
    text = http.get("/metrics").text
    for name, family in metric_families(text).items():
        assert family.documentation, name
        assert family.type in {"counter", "gauge", "histogram"}
        if family.type == "counter":
            assert f"{name}_total" in {sample.name for sample in family.samples}
        else:
            assert not name.endswith(("_total", "_count", "_sum", "_bucket", "_created")), name
        assert not name.endswith(("_ms", "_milliseconds", "_kb", "_mb", "_s", "_sec")), name
        assert name == name.lower()
        assert name.startswith(("rootstock_", "vllm:"))


HISTOGRAMS = {
    Latency.FIRST_TOKEN: "time_to_first_token",
    Latency.TOKEN_GAP: "time_between_tokens",
    Latency.REQUEST: "request",
    Latency.QUEUE_WAIT: "queue_wait",
    Latency.STEP: "step",
    Latency.MASK: "mask",
}


def test_histograms_are_cumulative_and_of_the_engines_latencies(
    http: httpx.Client, engine: FakeEngine
) -> None:
    latencies: dict[Latency, Histogram] = {}
    for count, latency in enumerate(HISTOGRAMS, 1):
        latencies[latency] = observed(latency, *[0.25] * count)[latency]
    engine.latencies = latencies
    text = http.get("/metrics").text
    for count, name in enumerate(HISTOGRAMS.values(), 1):
        assert value(text, f"rootstock_{name}_seconds_count") == count
        assert value(text, f"rootstock_{name}_seconds_sum") == pytest.approx(count / 4)
        assert value(text, f"rootstock_{name}_seconds_bucket", le="0.1") == 0
        assert value(text, f"rootstock_{name}_seconds_bucket", le="0.25") == count
        buckets = metric_families(text)[f"rootstock_{name}_seconds"].samples
        counts = [sample.value for sample in buckets if sample.name.endswith("_bucket")]
        assert all(left <= right for left, right in pairwise(counts))
        assert counts[-1] == count
    for theirs, count in [("time_to_first_token", 1), ("inter_token_latency", 2)]:
        name = f"vllm:{theirs}_seconds_count"
        assert value(text, name, model_name="test/bytes") == count


DRAFTS = {"grammar": (0, 0, 0), "prediction": (0, 0, 0), "tree": (5, 30, 24), "own": (2, 4, 1)}
FIGURES: list[tuple[str, dict[str, str], float]] = [
    ("up", {}, 1),
    ("kv_blocks", {"state": "held"}, 8),
    ("kv_copied_blocks_total", {"cause": "prefix"}, 7),
    ("kv_copied_blocks_total", {"cause": "fork"}, 3),
    ("kv_saved_blocks", {}, 12),
    ("kv_saved_bytes", {}, 393_216),
    ("prefix_hit_tokens_total", {}, 20),
    ("prefix_tail_hit_tokens_total", {}, 9),
    ("prefix_hit_ratio", {"window": "5m"}, 0.25),
    ("prefix_hit_ratio", {"window": "15m"}, 20 / 120),
    ("prompt_tokens_total", {"source": "cached"}, 20),
    ("computed_steps_total", {"path": "compiled", "model": "test/bytes"}, 25),
    ("computed_steps_total", {"path": "eager", "model": "test/bytes"}, 15),
    ("disk_entries", {}, 40),
    ("disk_used_bytes", {}, 5_242_880),
    ("disk_shared_bytes", {}, 7_340_032),
    ("disk_limit_bytes", {}, 1 << 30),
    ("disk_buffered_bytes", {}, 65_536),
    ("disk_read_bytes_total", {}, 1_048_576),
    ("disk_written_bytes_total", {}, 4_194_304),
    ("disk_hits_total", {}, 3),
    ("disk_loaded_tokens_total", {}, 900),
    ("disk_load_seconds_total", {}, 0.25),
    ("disk_given_up_loads_total", {}, 2),
    ("disk_evicted_entries_total", {}, 11),
    ("disk_refused_entries_total", {}, 5),
    ("disk_day_spent", {}, 0),
    ("disk_failures_total", {"fault": "checksum"}, 1),
    ("disk_failures_total", {"fault": "no_space"}, 0),  # none so far
    ("encoded_images_total", {}, 6),
    ("reused_images_total", {}, 4),
    ("image_feature_bytes", {"state": "kept"}, 4096),
    ("image_feature_bytes", {"state": "limit"}, 1 << 20),
    *(("drafts_total", {"source": name}, counts[0]) for name, counts in DRAFTS.items()),
    *(("draft_tokens_total", {"source": name}, counts[1]) for name, counts in DRAFTS.items()),
    *(
        ("draft_accepted_tokens_total", {"source": name}, counts[2])
        for name, counts in DRAFTS.items()
    ),
]
VLLM_FIGURES = {
    "prefix_cache_hits_total": 20,
    "kv_cache_usage_perc": 8 / 128,
    "prompt_tokens_total": 120,
    "spec_decode_num_drafts_total": 7,
    "spec_decode_num_draft_tokens_total": 34,
    "spec_decode_num_accepted_tokens_total": 25,
}


def test_figures_of_the_engine_are_exported_under_our_names_and_vllms(http: httpx.Client) -> None:
    text = http.get("/metrics").text
    for name, labels, figure in FIGURES:
        assert value(text, f"rootstock_{name}", **labels) == figure, (name, labels)
    assert {name: value(text, f"vllm:{name}") for name in VLLM_FIGURES} == VLLM_FIGURES
    windows = metric_families(text)["rootstock_prefix_hit_ratio"].samples
    assert len(windows) == 2, "of the last minute nothing is said, in which nothing was asked"


VLLM_PER_REQUEST = (
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_time_per_output_token_seconds",
)
"""Histograms that vLLM's Grafana dashboard shows."""


def test_prompts_and_answers_are_measured_under_vllms_names(
    http: httpx.Client, engine: FakeEngine
) -> None:
    def figures(suffix: str) -> dict[str, float]:
        text = http.get("/metrics").text
        return {
            name: value(text, f"vllm:{name}_{suffix}", model_name="test/bytes")
            for name in VLLM_PER_REQUEST
        }

    counts, sums = figures("count"), figures("sum")
    body = {"prompt": [97] * 30, "max_tokens": 4, "n": 2, "ignore_eos": True}
    usage = http.post("/v1/completions", json=body).json()["usage"]
    counted, summed = figures("count"), figures("sum")
    assert {name: counted[name] - counts[name] for name in counts} == {
        **dict.fromkeys(VLLM_PER_REQUEST, 2),
        "request_max_num_generation_tokens": 1,
    }
    added = {name: summed[name] - sums[name] for name in sums}
    assert added["request_prompt_tokens"] == 2 * usage["prompt_tokens"] == 60
    assert added["request_generation_tokens"] == usage["completion_tokens"] == 8
    assert added["request_max_num_generation_tokens"] == 4


def test_vllm_names_can_be_turned_off() -> None:
    with running(FakeEngine(), Settings(port=0, vllm_metric_names=False)) as base_url:
        assert "vllm:" not in httpx.get(f"{base_url}/metrics").text


def test_metrics_outlive_the_engine(http: httpx.Client, engine: FakeEngine) -> None:
    before = http.get("/metrics").text
    engine.script = Script(dead=True)
    after = http.get("/metrics").text
    assert value(after, "rootstock_up") == 0
    for name in ("rootstock_generated_tokens_total", "vllm:generation_tokens_total"):
        assert value(after, name) == value(before, name)


def test_a_stopping_daemon_drains_the_engine() -> None:
    engine = FakeEngine()
    with running(engine, Settings(port=0, drain_timeout_seconds=3)) as base_url:
        assert httpx.get(f"{base_url}/health").status_code == 200
        assert engine.drained.empty()
    assert engine.drained.get_nowait() == 3


def test_each_model_says_how_its_decodes_are_computed(http: httpx.Client) -> None:
    (model,) = http.get("/admin/models").json()["models"]
    assert model["decode"] == DECODE.why


def test_an_engine_that_computes_nothing_has_no_path_of_decodes() -> None:
    with running(FakeEngine(decode=None), Settings(port=0)) as url:
        assert "rootstock_computed_steps" not in httpx.get(f"{url}/metrics").text
        (model,) = httpx.get(f"{url}/admin/models").json()["models"]
    assert model["decode"] is None


@pytest.mark.parametrize("place", NAMES_METRICS)
def test_dashboards_alerts_and_documents_name_metrics_that_exist(
    place: str, tmp_path: Path
) -> None:
    """A panel over a misspelt name is just empty; nobody notices."""
    settings, sources = Settings(port=0, batches=tmp_path), ScriptedSources()
    models = registry_of(FakeEngine(), settings)
    guard = MemoryGuard(sources.read, models, settings.memory_guard)
    with serving(models, settings, guard=guard) as url, httpx.Client(base_url=url) as http:
        until(lambda: guard.readings)
        http.get("/health")  # answers are counted once they are over
        text = http.get("/metrics").text
    shown = {sample.name for family in metric_families(text).values() for sample in family.samples}
    asked = {name for path in ROOT.glob(place) for name in METRIC.findall(path.read_text())}
    assert asked
    assert asked <= shown


@pytest.mark.parametrize("name", [".", "../{}", "~/{}"])
def test_a_directory_is_served_under_its_last_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    engine = FakeEngine(card=replace(CARD, name=name.format(tmp_path.name)))
    with running(engine, Settings(port=0)) as url:
        models = httpx.get(f"{url}/v1/models").json()["data"]
    assert [model["id"] for model in models] == [tmp_path.name]
