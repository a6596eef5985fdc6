"""Where settings come from, which wins, and what is said of wrong ones."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine.values.settings import AdapterConfig, DiskCacheConfig, DiskWrites, EngineConfig
from kvstore.disk.types import DiskLimits
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
    assert (settings.port, settings.block_size) == (3, 64)
    assert (settings.max_running, settings.step_tokens) == (4, 512)


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
    assert load_settings({"kv_cache_bytes": given}).kv_cache_bytes == n_bytes


def test_several_values_are_a_list_in_yaml_and_have_commas_in_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "names.yaml"
    file.write_text("served_model_name: [one, two]\n")
    assert load_settings({"config": file}).served_model_name == ("one", "two")
    monkeypatch.setenv("ROOTSTOCK_SERVED_MODEL_NAME", "three, four")
    assert load_settings({"config": file}).served_model_name == ("three", "four")
    flags = {"config": file, "served_model_name": ["five", "six"]}
    assert load_settings(flags).served_model_name == ("five", "six")


def test_adapters_are_a_mapping_in_yaml_and_pairs_in_flags_and_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "adapters.yaml"
    file.write_text("adapters: {one: /a, two: /b}\n")
    expected = (AdapterConfig("one", Path("/a")), AdapterConfig("two", Path("/b")))
    assert config_of({"config": file}).adapters == expected
    monkeypatch.setenv("ROOTSTOCK_ADAPTERS", "three=/c, four=/d=e")
    adapters = load_settings({"config": file}).adapters
    assert adapters == {"three": Path("/c"), "four": Path("/d=e")}
    flags = {"config": file, "adapters": ["five=/f"]}
    assert load_settings(flags).adapters == {"five": Path("/f")}


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (["folder"], "adapters: must be NAME=FOLDER, such as sql=~/adapters/sql, not"),
        (["name="], "adapters: must be NAME=FOLDER"),
        (["a=/x", "a=/y"], "adapters: must have each name once"),
        (["=/x"], "adapters.: must match"),
        (["a:b=/x"], "adapters.a:b: must match"),
        ({"a": 1}, "adapters.a: must be a path, not 1"),
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
    flags = {
        "model": ["m"],
        "kv_cache_bytes": "1MiB",
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
    expected = EngineConfig(
        model="m",
        kv_cache_bytes=2**20,
        max_model_len=4096,
        block_size=8,
        max_running=2,
        max_waiting=3,
        step_tokens=4,
        max_prompt_share=0.5,
        prefix_cache=False,
        speculate="off",
        decode="eager",
        attention="gather",
        generation_config="none",
    )
    assert config_of(flags) == expected
    assert config_of(flags | {"max_model_len": "auto"}).max_model_len is None


def test_off_needs_no_quotes_in_yaml(tmp_path: Path) -> None:
    file = tmp_path / "rootstock.yaml"
    file.write_text("models:\n- model: a\n  speculate: off\n- model: b\n")
    settings = load_settings({"config": file})
    told = [settings.config_of(model).speculate for model in settings.each_model()]
    assert told == ["off", "auto"]


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


def test_a_disk_cache_may_be_written_without_a_daily_limit() -> None:
    flags = {"disk_cache": "/fast", "disk_cache_daily_bytes": 0}
    disk = config_of(flags).disk
    assert disk is not None
    assert disk.daily_bytes is None


def test_a_disk_cache_may_be_below_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "rootstock.yaml"
    file.write_text("disk_cache: ~/kv\n")
    assert load_settings({"config": file}).disk_cache == tmp_path / "kv"


def test_the_smallest_disk_cache_that_is_taken_is_large_enough_for_the_tier() -> None:
    DiskLimits(load_settings({"disk_cache_bytes": "16MiB"}).disk_cache_bytes)


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
        ({"block_size": 0}, "block_size", "1"),
        ({"kv_cache_bytes": "4 pounds"}, "kv_cache_bytes", "such as 8GiB, 512MB or 1048576, not"),
        ({"kv_cache_bytes": "8Gigs"}, "kv_cache_bytes", "such as 8GiB, 512MB or 1048576, not"),
        ({"kv_cache_bytes": "large"}, "kv_cache_bytes", "such as 8GiB, 512MB or 1048576, not"),
        ({"kv_cache_bytes": "-1"}, "kv_cache_bytes", ""),
        ({"kv_cache_bytes": 0}, "kv_cache_bytes", "0"),
        ({"attention": "flash"}, "attention", "'gather'"),
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


@pytest.mark.parametrize(
    ("entry", "lines"),
    [
        (
            "{model: models/tiny, max_runing: 4}",
            ["models[0] (models/tiny): there is no setting max_runing; did you mean max_running?"],
        ),
        ("{modl: m}", ["models[0]: there is no setting modl; did you mean model?"]),
        ("{model: m, colour: red}", ["models[0] (m): there is no setting colour"]),
        (
            "{port: 9302}",
            [
                "models[0]: port is a setting of the daemon, not of one model: "
                "move it to the top level"
            ],
        ),
        ("{max_running: 0}", ["models[0].max_running: must be at least 1, not 0"]),
        (
            "models/tiny",
            ["models[0]: must be a mapping such as {model: models/tiny}, not a text"],
        ),
        ("[a]", ["models[0]: must be a mapping such as {model: models/tiny}, not a list"]),
        ("", ["models[0]: must be a mapping such as {model: models/tiny}, not empty"]),
        ("{8: a}", ["models[0][8]: must be the name of a setting, not 8"]),
        (
            "{served_model_name: [a, 1]}",
            ["models[0].served_model_name[1]: must be a text, not 1"],
        ),
        ("{adapters: {a: 1}}", ["models[0].adapters.a: must be a path, not 1"]),
        (
            "{api_key: s3cret}",
            [
                "models[0]: api_key is a setting of the daemon, not of one model: "
                "move it to the top level"
            ],
        ),
        (
            "{step_tokens: 8}",
            [
                "models[0].step_tokens: must be at least max_running (32), because every running "
                "sequence computes a token in a step"
            ],
        ),
        (
            "{model: m, max_runing: 4, ttl_seconds: -1, block_size: many}",
            [
                "models[0] (m): there is no setting max_runing; did you mean max_running?",
                "models[0].block_size: must be an integer, not 'many'",
                "models[0].ttl_seconds: must be at least 0, not -1",
            ],
        ),
    ],
)
def test_an_error_in_an_entry_of_models_names_the_entry_and_the_setting(
    tmp_path: Path, entry: str, lines: list[str]
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(f"models:\n- {entry}\n- model: other\n")
    assert sorted(lines_of_error({"config": file})) == lines


def test_every_wrong_entry_of_models_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models:\n- b\n- {model: m, pinned: 3}\n- {model: n, kv_cache_bytes: lots}\n")
    assert lines_of_error({"config": file}) == [
        "models[0]: must be a mapping such as {model: models/tiny}, not a text",
        "models[1].pinned: must be true or false, not 3",
        "models[2].kv_cache_bytes: must be a size such as 8GiB, 512MB or 1048576, not 'lots'",
    ]


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


@pytest.mark.parametrize("name", Settings.model_fields)
def test_errors_name_the_setting_and_never_have_the_words_of_the_validator(name: str) -> None:
    for value in WRONG_VALUES:
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
    "content",
    [
        "port: [",
        "- port",
        "8000",
        "\x00",
        "port: 1\nprot: 2",
        "8000: port",
        "no: 1",
        "config: a.yaml",
    ],
)
def test_unusable_yaml_is_said_to_be(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(SettingsError) as caught:
        load_settings({"config": path})
    assert len(str(caught.value).splitlines()) == 1


def test_an_empty_yaml_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    assert load_settings({"config": path}).port == 8000


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


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "LocalHost", "::1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "127.0.0.1.example.org", "128.0.0.1"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_the_default_configuration_is_the_default() -> None:
    settings = load_settings({"config": CONFIGS / "default.yaml"})
    assert settings.model_copy(update={"config": None}) == load_settings({})


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_configuration_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOTSTOCK_API_KEY", "from-the-environment")
    assert load_settings({"config": path}).api_key is not None


def test_the_shared_configuration_wants_a_key() -> None:
    with pytest.raises(SettingsError, match="ROOTSTOCK_API_KEY"):
        load_settings({"config": CONFIGS / "shared-lan.yaml"})
