"""Where settings come from, which wins, and what is said of wrong ones."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from engine.values.settings import (
    AdapterConfig,
    DiskCacheConfig,
    DiskWrites,
    EngineConfig,
    KVEventsConfig,
)
from kvstore.disk.types import DiskLimits
from server.access.keys import admin_key, entry_text
from server.http.listening import is_loopback
from server.settings import Settings, SettingsError, load_settings

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"ROOTSTOCK_{name.upper()}", raising=False)


def lines_of_error(flags: dict[str, object]) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load_settings(flags)
    return str(caught.value).splitlines()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "rootstock.yaml"
    path.write_text("port: 1\nblock_size: 16\nmax_running: 4\n")
    return path


def test_flag_beats_environment_beats_yaml_beats_default(
    monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    monkeypatch.setenv("ROOTSTOCK_PORT", "2")
    monkeypatch.setenv("ROOTSTOCK_BLOCK_SIZE", "64")
    settings = load_settings({"config": config, "port": 3})
    assert (settings.port, settings.engine.block_size) == (3, 64)
    assert (settings.engine.max_running, settings.engine.step_tokens) == (4, 512)


def test_the_config_file_can_be_named_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    monkeypatch.setenv("ROOTSTOCK_CONFIG", str(config))
    assert load_settings({}).port == 1


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOTSTOCK_API_KEY", "")
    monkeypatch.setenv("ROOTSTOCK_PORT", "")
    assert (load_settings({}).api_key, load_settings({}).port) == (None, 8000)


@pytest.mark.parametrize(
    ("given", "n_bytes"),
    [("4GiB", 4 * 2**30), ("512MB", 512 * 10**6), ("1.5 KiB", 1536), ("7", 7), (123, 123)],
)
def test_byte_sizes(given: str | int, n_bytes: int) -> None:
    assert load_settings({"kv_cache_bytes": given}).engine.kv_cache_bytes == n_bytes


def test_a_yaml_file_a_variable_and_flags_each_have_a_form_of_several_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "several.yaml"
    file.write_text("served_model_name: [one, two]\nadapters: {one: /a, two: /b}\n")
    expected = (AdapterConfig("one", Path("/a")), AdapterConfig("two", Path("/b")))
    assert load_settings({"config": file}).served_model_name == ("one", "two")
    assert config_of({"config": file}).adapters == expected
    monkeypatch.setenv("ROOTSTOCK_SERVED_MODEL_NAME", "three, four")
    monkeypatch.setenv("ROOTSTOCK_ADAPTERS", "three=/c, four=/d=e")
    settings = load_settings({"config": file})
    assert settings.served_model_name == ("three", "four")
    assert settings.adapters == {"three": Path("/c"), "four": Path("/d=e")}
    flags = {"config": file, "served_model_name": ["five", "six"], "adapters": ["five=/f"]}
    settings = load_settings(flags)
    assert settings.served_model_name == ("five", "six")
    assert settings.adapters == {"five": Path("/f")}


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (["folder"], "adapters: must be NAME=FOLDER, such as sql=~/adapters/sql, not"),
        (["name="], "adapters: must be NAME=FOLDER"),
        (["a=/x", "a=/y"], "adapters: must have each name once"),
        (["=/x"], "adapters.: must match"),
        (["a:b=/x"], "adapters.a:b: must match"),
        ({"a": 1}, "adapters.a: must be a path, not 1"),
        (["a=~nobody-here/x"], "adapters.a: begins with a home that is not known, not "),
    ],
)
def test_adapters_that_are_none(given: object, fault: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(fault)):
        load_settings({"adapters": given})


def test_an_adapters_name_is_no_alias() -> None:
    flags: dict[str, object] = {"adapters": ["b=/x"], "served_model_name": ["a", "a:b"]}
    assert lines_of_error(flags) == ["served_model_name: a:b is the name of an adapter"]


def test_settings_are_frozen() -> None:
    settings = load_settings({})
    with pytest.raises(ValidationError):
        settings.port = 1  # type: ignore[misc]


def config_of(flags: dict[str, Any]) -> EngineConfig:
    """What the engine of the only model is told."""
    settings = load_settings(flags)
    (model,) = settings.each_model()
    return settings.config_of(model)


def test_engine_config_takes_its_share() -> None:
    alike: dict[str, Any] = {
        "max_model_len": 4096,
        "block_size": 8,
        "max_running": 2,
        "max_waiting": 3,
        "step_tokens": 4,
        "max_prompt_share": 0.5,
        "prefix_cache": False,
        "speculate": "off",
        "decode": "eager",
        "attention": "gather",
        "generation_config": "none",
    }
    flags = {"model": ["m"], "kv_cache_bytes": "1MiB", **alike}
    assert config_of(flags) == EngineConfig(model="m", kv_cache_bytes=2**20, **alike)
    assert config_of(flags | {"max_model_len": "auto"}).max_model_len is None


def test_settings_of_the_engine_have_the_defaults_that_the_engine_declares() -> None:
    assert config_of({}) == EngineConfig(model="")


def test_off_needs_no_quotes_in_yaml(tmp_path: Path) -> None:
    file = tmp_path / "rootstock.yaml"
    file.write_text("models:\n- model: a\n  speculate: off\n- model: b\n")
    settings = load_settings({"config": file})
    told = [settings.config_of(model).speculate for model in settings.each_model()]
    assert told == ["off", "auto"]


def test_every_path_may_begin_with_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shell replaces ~ in a YAML file, or in a variable that systemd sets."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ROOTSTOCK_CONFIG", "~/rootstock.yaml")
    paths = {"disk_cache": "kv", "api_keys_file": "keys.yaml", "warm_prompts": "prompts.yaml"}
    lines = [f"{name}: ~/{path}\n" for name, path in paths.items()]
    lines.append("adapters: {sql: ~/sql}\n")
    (tmp_path / "rootstock.yaml").write_text("".join(lines))
    (tmp_path / "prompts.yaml").write_text("[Hello]")
    (tmp_path / "keys.yaml").write_text(entry_text(admin_key("k")).replace("api_key", "ann"))
    settings = load_settings({})
    assert {name: getattr(settings, name) for name in paths} == {
        name: tmp_path / path for name, path in paths.items()
    }
    assert [key.name for key in settings.keys.keys] == ["ann"]
    assert settings.adapters == {"sql": tmp_path / "sql"}


def test_a_disk_cache_is_asked_for_by_its_directory() -> None:
    assert config_of({"disk_cache_write": "all"}).disk is None
    flags = {"disk_cache": "/fast", "disk_cache_bytes": "1GiB", "disk_cache_write": "exit"}
    others = {
        "disk_cache_daily_bytes": "2GiB",
        "disk_cache_shutdown_seconds": "3",
        "disk_cache_salted": True,
    }
    expected = DiskCacheConfig(Path("/fast"), 2**30, DiskWrites.EXIT, 2 * 2**30, 3.0, True)
    assert config_of({**flags, **others}).disk == expected
    unlimited = config_of({"disk_cache": "/fast", "disk_cache_daily_bytes": 0}).disk
    assert unlimited is not None
    assert unlimited.daily_bytes is None
    DiskLimits(load_settings({"disk_cache_bytes": "16MiB"}).disk_cache_bytes)  # the smallest


def test_a_model_without_a_prefix_cache_leaves_the_disk_cache_to_the_others() -> None:
    entries = [{"model": "a", "prefix_cache": False}, {"model": "b"}]
    settings = load_settings({"disk_cache": "/fast", "models": entries})
    without, with_one = map(settings.config_of, settings.each_model())
    assert without.disk is None
    assert with_one.disk is not None


@pytest.mark.parametrize(
    ("flags", "name", "limit"),
    [
        ({"disk_cache_bytes": "15MiB"}, "disk_cache_bytes", "16777216"),
        ({"disk_cache_write": "never"}, "disk_cache_write", "'selective'"),
        ({"disk_cache_daily_bytes": "-1"}, "disk_cache_daily_bytes", ""),
        ({"disk_cache_shutdown_seconds": 3601}, "disk_cache_shutdown_seconds", "3600"),
        ({"disk_cache": "~nobody-here/kv"}, "disk_cache", "home"),
        ({"disk_cache": "/fast", "prefix_cache": False}, "disk_cache", "prefix_cache"),
        ({"port": 65536}, "port", "65535"),
        ({"port": "http"}, "port", "integer"),
        ({"host": "llm..lan"}, "host", "the name of a host"),
        ({"host": "127.0.0.1:80"}, "host", "without a port"),
        ({"host": ""}, "host", "at least 1"),
        ({"port": True}, "port", "must be an integer, not True"),
        ({"ttl_seconds": False}, "ttl_seconds", "must be a number, not False"),
        (
            {"disk_cache_daily_bytes": False},
            "disk_cache_daily_bytes",
            "must be a size such as 8GiB",
        ),
        ({"disk_cache": ""}, "disk_cache", "must be a path, not ''"),
        ({"block_size": 0}, "block_size", "1"),
        ({"kv_cache_bytes": "4 pounds"}, "kv_cache_bytes", "such as 8GiB, 512MB or 1048576, not"),
        ({"kv_cache_bytes": "8Gigs"}, "kv_cache_bytes", "such as 8GiB, 512MB or 1048576, not"),
        ({"kv_cache_bytes": "large"}, "kv_cache_bytes", "such as 8GiB, 512MB or 1048576, not"),
        ({"kv_cache_bytes": "-1"}, "kv_cache_bytes", ""),
        ({"kv_cache_bytes": 0}, "kv_cache_bytes", "0"),
        ({"attention": "flash"}, "attention", "'gather'"),
        ({"kv_format": "q3"}, "kv_format", "must be 'auto', 'full', 'f16', 'bf16', 'q8' or 'k8v4'"),
        ({"generation_config": "vllm"}, "generation_config", "'auto' or 'none'"),
        ({"log_level": "loud"}, "log_level", "'warning'"),
        ({"max_total_body_bytes": "1MiB"}, "max_total_body_bytes", "8388608"),
        ({"max_running": 64, "step_tokens": 32}, "step_tokens", "64"),
        ({"max_prompt_share": -0.1}, "max_prompt_share", "0"),
        ({"max_prompt_share": "nan"}, "max_prompt_share", "1"),
        ({"max_prompt_share": "inf"}, "max_prompt_share", "1"),
        ({"max_prompt_share": "off"}, "max_prompt_share", "number"),
        ({"keepalive_seconds": 0}, "keepalive_seconds", "0"),
        ({"api_key": "with space "}, "api_key", "ASCII"),
        ({"api_key": "schlüssel"}, "api_key", "ASCII"),
        ({"trusted_proxies": "10.0.0.1, proxy.local"}, "trusted_proxies", "IP addresses"),
        ({"trusted_proxies": "*"}, "trusted_proxies", "networks"),
        ({"allowed_host": "llm.lan:80"}, "allowed_host", "without a port"),
        ({"allowed_host": "*"}, "allowed_host", "*.example.org"),
        ({"cors_origin": "example.org"}, "cors_origin", "https://chat.example.org"),
        ({"cors_origin": "https://a.example/"}, "cors_origin", "vscode-webview"),
        ({"cors_origin": "*"}, "cors_origin", "API keys"),
        ({"request_timeout_seconds": 0}, "request_timeout_seconds", "0"),
        ({"cache_namespace": "user"}, "cache_namespace", "'shared' or 'key'"),
        ({"colour": "red"}, "colour", "no such setting"),
        ({"config": "/no/such/file.yaml"}, "config", "No such file"),
        ({"config": "~nobody-here/file.yaml"}, "config", "begins with a home that is not known"),
        ({"api_keys_file": "~nobody-here/k.yaml"}, "api_keys_file", "home"),
        ({"warm_prompts": "~nobody-here/p.yaml"}, "warm_prompts", "home"),
    ],
)
def test_errors_are_one_line_with_the_setting_and_the_limit(
    flags: dict[str, object], name: str, limit: str
) -> None:
    (line,) = lines_of_error(flags)
    assert line.startswith(f"{name}: ")
    assert limit in line


def test_every_wrong_setting_has_its_line() -> None:
    names = [line.partition(":")[0] for line in lines_of_error({"port": -1, "block_size": -1})]
    assert sorted(names) == ["block_size", "port"]


def test_a_misspelt_variable_is_refused_with_what_was_meant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROOTSTOCK_PROT", "8001")
    monkeypatch.setenv("rootstock_colour", "red")
    assert lines_of_error({}) == [
        "ROOTSTOCK_COLOUR: there is no such setting",
        "ROOTSTOCK_PROT: there is no such setting; did you mean ROOTSTOCK_PORT?",
    ]


def test_a_misspelt_key_in_yaml_is_refused_with_what_was_meant(tmp_path: Path) -> None:
    path = tmp_path / "typo.yaml"
    path.write_text("max_runing: 4\n")
    assert lines_of_error({"config": path}) == [
        "max_runing: there is no such setting; did you mean max_running?"
    ]


MAPPING = ": must be a mapping such as {model: models/tiny}, not "
OF_THE_DAEMON = " is a setting of the daemon, not of one model: move it to the top level"


@pytest.mark.parametrize(
    ("entry", "faults"),
    [
        (
            "{model: models/tiny, max_runing: 4}",
            [" (models/tiny): there is no setting max_runing; did you mean max_running?"],
        ),
        ("{modl: m}", [": there is no setting modl; did you mean model?"]),
        ("{model: m, colour: red}", [" (m): there is no setting colour"]),
        ("{port: 9302}", [f": port{OF_THE_DAEMON}"]),
        ("{api_key: s3cret}", [f": api_key{OF_THE_DAEMON}"]),
        ("{max_running: 0}", [".max_running: must be at least 1, not 0"]),
        ("{pinned: 3}", [".pinned: must be true or false, not 3"]),
        ("models/tiny", [f"{MAPPING}a text"]),
        ("[a]", [f"{MAPPING}a list"]),
        ("", [f"{MAPPING}empty"]),
        ("{8: a}", ["[8]: must be the name of a setting, not 8"]),
        ("{served_model_name: [a, 1]}", [".served_model_name[1]: must be a text, not 1"]),
        ("{adapters: {a: 1}}", [".adapters.a: must be a path, not 1"]),
        (
            "{step_tokens: 8}",
            [
                ".step_tokens: must be at least max_running (32), because every running sequence "
                "computes a token in a step"
            ],
        ),
        (
            "{model: m, max_runing: 4, ttl_seconds: -1, block_size: many}",
            [
                " (m): there is no setting max_runing; did you mean max_running?",
                ".block_size: must be an integer, not 'many'",
                ".ttl_seconds: must be at least 0, not -1",
            ],
        ),
    ],
)
def test_an_error_in_an_entry_of_models_names_the_entry_and_the_setting(
    tmp_path: Path, entry: str, faults: list[str]
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(f"models:\n- {entry}\n- model: other\n- {{model: n, kv_cache_bytes: lots}}\n")
    *lines, last = sorted(lines_of_error({"config": file}))
    assert lines == [f"models[0]{fault}" for fault in faults]
    assert last.startswith("models[2].kv_cache_bytes: must be a size such as 8GiB, 512MB or ")


@pytest.mark.parametrize(
    ("shared", "entry", "line"),
    [
        ("step_tokens: 40", "{model: m, max_running: 64}", "step_tokens: must be at least "),
        ("pooling: last", "{model: m, reranker: yes-no}", "reranker: a model that reranks "),
        ("adapters: {b: /x}", "{served_model_name: [a, 'a:b']}", "served_model_name: a:b is "),
    ],
)
def test_an_entry_of_models_must_agree_with_what_holds_for_all(
    tmp_path: Path, shared: str, entry: str, line: str
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(f"{shared}\nmodel: first\nmodels:\n- model: second\n- {entry}\n")
    (error,) = lines_of_error({"config": file})
    assert error.startswith(f"models[1].{line}")


def test_models_in_a_variable_are_json_and_their_errors_name_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROOTSTOCK_MODELS", '[{"model": "a"}, {"model": "b"}]')
    assert [model.model for model in load_settings({}).each_model()] == ["a", "b"]
    monkeypatch.setenv("ROOTSTOCK_MODELS", '[{"model": "a", "max_runing": 4}]')
    assert lines_of_error({}) == [
        "models[0] (a): there is no setting max_runing; did you mean max_running? "
        "(set by ROOTSTOCK_MODELS)"
    ]
    monkeypatch.setenv("ROOTSTOCK_MODELS", "a,b")
    assert lines_of_error({}) == ["models: must be a list, not a text (set by ROOTSTOCK_MODELS)"]


def test_an_error_names_the_variable_only_where_it_set_the_value(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "rootstock.yaml"
    file.write_text("port: x\n")
    assert lines_of_error({"config": file}) == ["port: must be an integer, not 'x'"]
    monkeypatch.setenv("rootstock_port", "y")
    line = "port: must be an integer, not 'y' (set by ROOTSTOCK_PORT)"
    assert lines_of_error({"config": file}) == [line]
    assert lines_of_error({"port": "z"}) == ["port: must be an integer, not 'z'"]
    monkeypatch.delenv("rootstock_port")
    monkeypatch.setenv("ROOTSTOCK_STEP_TOKENS", "8")
    (line,) = lines_of_error({})
    assert line.startswith("step_tokens: must be at least max_running (32)")
    assert line.endswith("(set by ROOTSTOCK_STEP_TOKENS)")


def test_a_long_value_is_cut_short_in_its_error() -> None:
    (line,) = lines_of_error({"port": "9" * 9999})
    assert line.startswith("port: ")
    assert len(line) < 200


WRONG_VALUES = (None, {"a": [1]}, [["a"], {}], "\x01", -1, "9" * 5000)


def test_errors_name_the_setting_and_never_have_the_words_of_the_validator() -> None:
    for name, value in product(Settings.model_fields, WRONG_VALUES):
        for place, flags in (("", {name: value}), ("models[0]", {"models": [{name: value}]})):
            if name == "config" and not place:
                continue  # names a file, which is read
            try:
                load_settings(flags)
            except SettingsError as error:
                for line in str(error).splitlines():
                    assert not re.search("(?i)input|valid|should|pydantic|class", line)
                    assert line.startswith(place)
                    assert name in line


def test_variables_that_are_no_settings_of_the_daemon_do_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROOTSTOCK_CLIENT_API_KEY", "k")
    monkeypatch.setenv("ROOTSTOCK_PROT", "")
    monkeypatch.setenv("MY_ROOTSTOCK_PROT", "1")
    monkeypatch.setenv("rootstock_port", "8001")
    assert load_settings({}).port == 8001


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            "port: 1\n   model: x\n",
            "bad.yaml, line 2: mapping values are not allowed here (is the line indented too far, "
            "or a text with a colon not in quotes?)",
        ),
        (
            "model:\n\t- x\n",
            "bad.yaml, line 2: found character '\\t' that cannot start any token (indent with "
            "spaces)",
        ),
        ("model: [x\nport: 1\n", "bad.yaml, line 2: expected ',' or ']', but got ':'"),
        (
            "a: \0",
            "bad.yaml is not valid YAML: unacceptable character #x0000: special characters are not "
            "allowed in",
        ),
        ("port: [", "bad.yaml, line 1"),
        ("- port", "bad.yaml must map setting names to values"),
        ("8000", "bad.yaml must map setting names to values"),
        ("port: 1\nprot: 2", "prot"),
        ("8000: port", "bad.yaml must map setting names to values"),
        ("no: 1", "bad.yaml must map setting names to values"),
        ("config: a.yaml", "config"),
        ("port: 1\nmodel: x\nport: 2", "bad.yaml, line 3: port is there twice"),
        ("models:\n- model: x\n  model: y", "bad.yaml, line 3: model is there twice"),
    ],
)
def test_unusable_yaml_is_said_to_be(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    (line,) = lines_of_error({"config": path})
    assert problem in line


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.2", "::", "example.org"])
def test_other_machines_need_a_key_or_an_explicit_word(host: str) -> None:
    with pytest.raises(SettingsError, match="allow_public_without_key"):
        load_settings({"host": host})
    assert load_settings({"host": host, "api_key": "k"}).host == host
    assert load_settings({"host": host, "allow_public_without_key": True}).host == host


def test_the_key_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOTSTOCK_API_KEY", "s3cret")
    assert "s3cret" not in repr(load_settings({}))
    with pytest.raises(SettingsError) as caught:
        load_settings({"api_key": " s3cret"})
    assert "s3cret" not in str(caught.value)


def test_idle_connections_outlast_those_in_the_pools_of_clients() -> None:
    """aiohttp and undici take one for good that is younger than theirs; proxies keep them 75 s."""
    assert load_settings({}).idle_timeout_seconds >= 75


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "localhost", "LocalHost", "::1")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "127.0.0.1.example.org", "128.0.0.1")))


def test_every_configuration_loads_and_the_default_one_and_an_empty_one_are_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty := tmp_path / "empty.yaml").write_text("# nothing\n")
    for path in (CONFIGS / "default.yaml", empty):
        settings = load_settings({"config": path})
        assert settings.model_copy(update={"config": None}) == load_settings({})
    with pytest.raises(SettingsError, match="ROOTSTOCK_API_KEY"):
        load_settings({"config": CONFIGS / "shared-lan.yaml"})
    monkeypatch.setenv("ROOTSTOCK_API_KEY", "from-the-environment")
    for path in CONFIGS.glob("*.yaml"):
        assert load_settings({"config": path}).api_key is not None, path.name


class TestKVEvents:
    @pytest.mark.parametrize(
        ("given", "endpoint"),
        [
            ("5557", "tcp://127.0.0.1:5557"),
            ("0", "tcp://127.0.0.1:0"),
            ("tcp://localhost:5557", "tcp://127.0.0.1:5557"),
            ("tcp://10.0.0.11:5557", "tcp://10.0.0.11:5557"),
            ("0.0.0.0:5557", "tcp://0.0.0.0:5557"),
            ("tcp://[::1]:5557", "tcp://[::1]:5557"),
            ('{"enable_kv_cache_events": true}', "tcp://127.0.0.1:5557"),
        ],
    )
    def test_addresses(self, given: str, endpoint: str) -> None:
        assert load_settings({"kv_events": given}).engine.kv_events_config == KVEventsConfig(
            endpoint
        )

    def test_vllms_json(self, tmp_path: Path) -> None:
        vllm: dict[str, Any] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": "tcp://10.0.0.11:5557",
            "replay_endpoint": "tcp://10.0.0.11:5558",
            "buffer_steps": 100,
            "hwm": 500,
            "max_queue_size": 1000,
            "topic": "kv@1",
        }
        expected = KVEventsConfig(vllm["endpoint"], vllm["replay_endpoint"], "kv@1", 100, 500)
        file = tmp_path / "rootstock.yaml"
        file.write_text(yaml.safe_dump({"kv_events": vllm}))
        for flags in ({"kv_events": json.dumps(vllm)}, {"config": file}):
            assert load_settings(flags).engine.kv_events_config == expected

    @pytest.mark.parametrize(
        "given",
        [
            '{"enable_kv_cache_events": false, "publisher": "zmq"}',
            '{"enable_kv_cache_events": true, "publisher": "null"}',
        ],
    )
    def test_vllms_json_may_turn_them_off(self, given: str) -> None:
        assert load_settings({"kv_events": given}).engine.kv_events_config is None

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ("tcp://*:5557", "must name its address"),
            ('{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}', "must name its"),
            ("ipc:///tmp/events", "must be a port or an address"),
            ("tcp://example.org:1", "must be a port or an address"),
            ("tcp://127.0.0.1:65536", "must be a port or an address"),
            ("tcp://127.0.0.1", "must be a port or an address"),
            ("yes", "must be a port or an address"),
            ("{", "Expecting property name"),
            ('{"publisher": "kafka"}', "knows the publishers"),
            ('{"endpoints": ""}', "has no field endpoints"),
            ('{"buffer_steps": 0}', "needs a number as its buffer_steps"),
            ('{"hwm": 99}', "needs a number as its hwm"),
            ('{"hwm": "many"}', "needs a number as its hwm"),
            ('{"topic": 7}', "needs a text as its topic"),
        ],
    )
    def test_what_is_refused(self, given: str, said: str) -> None:
        (line,) = lines_of_error({"kv_events": given})
        assert line.startswith(f"kv_events: {said}")

    def test_each_model_has_its_own(self) -> None:
        models = [{"model": "a", "kv_events": 5557}, {"model": "b"}]
        first, second = load_settings({"models": models}).each_model()
        assert first.engine.kv_events_config == KVEventsConfig("tcp://127.0.0.1:5557")
        assert second.engine.kv_events_config is None

    @pytest.mark.parametrize(
        ("flags", "line"),
        [
            ({"kv_events_replay": "1"}, "kv_events_replay: needs kv_events"),
            (
                {"kv_events": "1", "prefix_cache": False},
                "kv_events: needs the prefix cache, which is turned off",
            ),
        ],
    )
    def test_what_is_missing(self, flags: dict[str, object], line: str) -> None:
        assert lines_of_error(flags) == [line]
