"""`--model` of the commands that ask a daemon: which of its several models they are about."""

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner, Result

from server.cli import app
from server.registry import ModelRegistry
from tests.contract.daemon import serving
from tests.contract.test_several_models import Engines, needs, settings_of


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def url(engines: Engines) -> Iterator[str]:
    """Of a daemon with three models, of which the first is loaded."""
    settings = settings_of()
    with serving(ModelRegistry(settings, engines, needs), settings) as base_url:
        yield f"{base_url}/v1"


def run(*arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(app, arguments, input=typed, env={"COLUMNS": "200"})


def test_a_chat_is_with_the_model_that_is_named(url: str, engines: Engines) -> None:
    for model, answer in (("uno", "I am load 1\n"), ("two", "I am load 2\n")):
        assert run("chat", "--url", url, "--model", model, typed="hi\n").stdout == answer
    joined = run_joined(url, "chat", "--model", "two", typed="hi\n")
    assert (joined.stdout, len(engines.started)) == ("I am load 2\n", 2)


def run_joined(url: str, *arguments: str, typed: str) -> Result:
    """On the daemon that runs at the port of the settings."""
    port = url.removesuffix("/v1").rpartition(":")[2]
    return CliRunner().invoke(app, arguments, input=typed, env={"ROOTSTOCK_PORT": port})


def test_the_cache_is_that_of_the_model_that_is_named(url: str, engines: Engines) -> None:
    probed = run("cache", "probe", "hi", "--model", "two", "--url", url)
    assert probed.stdout == "0 of 20 tokens are cached\n"
    assert len(engines.started) == 2, "it was loaded for that"
    assert run("cache", "stats", "--model", "two", "--url", url).exit_code == 0
    assert run("cache", "clear", "--model", "two", "--url", url).exit_code == 0
    assert [engine.cleared.qsize() for engine in engines.made] == [0, 1]
    assert run("cache", "clear", "--url", url).exit_code == 0
    assert [engine.cleared.qsize() for engine in engines.made] == [1, 1]


def test_top_watches_the_model_that_is_named(url: str, engines: Engines) -> None:
    assert run("load", "two", "--url", url).exit_code == 0
    assert run("top", "--model", "two", "--url", url).exit_code == 0
    assert [engine.looks for engine in engines.made] == [0, 1]


@pytest.mark.parametrize("command", [("cache", "stats"), ("cache", "clear"), ("top",)])
def test_a_model_that_cannot_be_looked_into_is_said_to_be_so(
    url: str, command: tuple[str, ...]
) -> None:
    unloaded = run(*command, "--model", "two", "--url", url)
    assert (unloaded.exit_code, unloaded.stdout) == (1, "")
    assert "The model 'two' is not loaded: it is unloaded." in unloaded.stderr
    unknown = run(*command, "--model", "four", "--url", url)
    assert unknown.exit_code == 1
    assert "The model 'four' does not exist; there is 'one', 'uno'" in unknown.stderr


def test_a_directory_has_no_model(tmp_path: object) -> None:
    result = run("cache", "clear", str(tmp_path), "--model", "two")
    assert result.exit_code == 2
    assert "--model" in result.stderr
