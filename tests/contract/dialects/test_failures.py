"""Refusals and failures: a status before the first token, an event of the dialect after it, and
the official client raises either.
"""

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from engine.api import EngineStopped, InvalidRequest, QueueFull
from tests.contract.access.helpers import bearer, key_file, secret_of
from tests.contract.dialects.adapters import Chat, Completions, Dialect, Messages, Ollama
from tests.contract.dialects.conftest import STREAMS
from tests.contract.scripted import Daemon


def kind_of(dialect: Dialect, openais: str | None, anthropics: str) -> str | None:
    """What the error is called: a code of OpenAI's, a type of Anthropic's; Ollama has no names."""
    if isinstance(dialect, Ollama):
        return None
    return anthropics if isinstance(dialect, Messages) else openais


@dataclass(frozen=True)
class Refusal:
    raised: Exception
    status: int
    retry_after: str | None
    openais: str | None
    anthropics: str


REFUSALS = [
    Refusal(InvalidRequest("too much", "prompt"), 400, None, None, "invalid_request_error"),
    Refusal(QueueFull("full", 7), 429, "7", "rate_limit_exceeded", "rate_limit_error"),
    Refusal(EngineStopped("stopping"), 503, "5", "engine_stopped", "overloaded_error"),
    Refusal(RuntimeError("a secret path"), 500, None, "internal_error", "api_error"),
]


@STREAMS
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: type(refusal.raised).__name__)
def test_what_the_engine_refuses_has_a_status(
    hermes: Daemon, dialect: Dialect, refusal: Refusal, stream: bool
) -> None:
    hermes.say("", refusal=refusal.raised)
    answer = dialect.post(hermes.http, stream=stream)
    message, kind = dialect.error(answer)
    assert (answer.status_code, answer.headers.get("retry-after")) == (
        refusal.status,
        refusal.retry_after,
    )
    assert kind == kind_of(dialect, refusal.openais, refusal.anthropics)
    assert "secret" not in message
    assert answer.headers["x-request-id"]


@STREAMS
def test_the_client_raises_what_the_engine_refuses(
    hermes: Daemon, dialect: Dialect, stream: bool
) -> None:
    hermes.say("", refusal=QueueFull("full", 7))
    with pytest.raises(dialect.refused) as caught:
        dialect.ask(hermes, stream=stream)
    assert getattr(caught.value, "status_code", None) == 429


@STREAMS
def test_a_failure_before_the_first_token_has_a_status(
    hermes: Daemon, dialect: Dialect, stream: bool
) -> None:
    hermes.say("Hello", fails_after_tokens=0)
    answer = dialect.post(hermes.http, stream=stream)
    assert (answer.status_code, dialect.error(answer)[0]) == (500, "it broke")


def test_a_failure_in_mid_stream_is_the_last_event(hermes: Daemon, dialect: Dialect) -> None:
    hermes.say("Hello", fails_after_tokens=2)
    answer = dialect.post(hermes.http, stream=True)
    assert answer.status_code == 200
    *_, last = dialect.events(answer.text.splitlines())
    assert last is not None
    assert dialect.failure(last) == "it broke"
    assert "[DONE]" not in answer.text


@pytest.mark.parametrize("dialect", [Chat(), Completions(), Messages(), Ollama()], ids=repr)
def test_the_client_raises_a_failure_in_mid_stream(hermes: Daemon, dialect: Dialect) -> None:
    """The client of the Responses API receives a failed response."""
    hermes.say("Hello", fails_after_tokens=2)
    with pytest.raises(dialect.refused, match="it broke"):
        dialect.ask(hermes, stream=True)


@STREAMS
def test_a_prompt_that_is_too_long_is_a_400_with_words_that_clients_know(
    hermes: Daemon, dialect: Dialect, stream: bool
) -> None:
    """Claude Code compacts at those of Anthropic, others at those of OpenAI."""
    answer = dialect.post(hermes.http, stream=stream, text="x" * 600)
    message, kind = dialect.error(answer)
    assert answer.status_code == 400
    assert kind == kind_of(dialect, "context_length_exceeded", "invalid_request_error")
    n_tokens = 600 if isinstance(dialect, Completions) else 600 + len("<user>\n<assistant>")
    assert str(n_tokens) in message
    anthropics = "prompt is too long: {} tokens > 512 maximum"
    openais = "This model's maximum context length is 512 tokens"
    assert (anthropics.format(n_tokens) if isinstance(dialect, Messages) else openais) in message
    assert hermes.engine.submitted.empty()


@STREAMS
def test_a_model_that_is_not_there_is_a_404(hermes: Daemon, dialect: Dialect, stream: bool) -> None:
    answer = dialect.post(hermes.http, stream=stream, more={"model": "nobody"})
    assert answer.status_code == 404
    assert dialect.error(answer)[1] == kind_of(dialect, "model_not_found", "not_found_error")


def test_pages_of_others_and_other_encodings_are_refused_in_the_dialect(
    hermes: Daemon, dialect: Dialect
) -> None:
    foreign = dialect.post(hermes.http, headers={"Origin": "https://example.com"})
    assert foreign.status_code == 403
    assert dialect.error(foreign)[1] == kind_of(dialect, "foreign_origin", "permission_error")
    packed = gzip.compress(json.dumps(dialect.body()).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    refused = hermes.http.post(dialect.path, content=packed, headers=headers)
    assert refused.status_code == 415
    assert "Content-Encoding: 'gzip'" in dialect.error(refused)[0]


@pytest.fixture(scope="module")
def small(no_settings_from_outside: None) -> Iterator[Daemon]:
    with Daemon.serving(max_body_bytes=10, max_total_body_bytes=10) as made:
        yield made


def test_a_body_that_is_too_large_is_refused_in_the_dialect(
    small: Daemon, dialect: Dialect
) -> None:
    answer = dialect.post(small.http)
    assert answer.status_code == 413
    assert dialect.error(answer)[1] == kind_of(dialect, "body_too_large", "request_too_large")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Daemon]:
    """Alice may ask once a minute."""
    keys = key_file(tmp_path, alice={"requests_per_minute": 1}, bob={})
    with Daemon.serving(api_keys_file=keys) as made:
        yield made


def test_keys_are_asked_for_and_their_limits_told_in_the_dialect(
    guarded: Daemon, dialect: Dialect
) -> None:
    def post(headers: Mapping[str, str]) -> httpx.Response:
        return dialect.post(guarded.http, headers=headers)

    wrong = post(bearer("guessed"))
    assert (wrong.status_code, wrong.headers["www-authenticate"]) == (401, "Bearer")
    assert dialect.error(wrong)[1] == kind_of(dialect, "invalid_api_key", "authentication_error")
    for headers in (bearer(secret_of("bob")), {"x-api-key": secret_of("bob")}):
        assert post(headers).status_code == 200
    first, spent = (post(bearer(secret_of("alice"))) for _ in range(2))
    assert (first.status_code, spent.status_code) == (200, 429)
    assert dialect.error(spent)[1] == kind_of(dialect, "rate_limit_exceeded", "rate_limit_error")
    assert 1 <= int(spent.headers["retry-after"]) <= 60
