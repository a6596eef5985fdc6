"""API keys, their limits, and which web pages may ask."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.access.admission import KeyLimits, LimitReached, Origins, is_own
from server.access.hosts import is_origin
from server.access.keys import (
    MAX_KEYS,
    ApiKey,
    KeyFileError,
    Keyring,
    Role,
    digest_of,
    entry_text,
    new_secret,
    read_keys,
)
from server.record import Principal, RequestRecord
from server.settings import SettingsError, load_settings
from server.terminal.cli import app

DIGEST = sha256(b"alice's").hexdigest()
OTHER_DIGEST = sha256(b"bob's").hexdigest()


def keys_of(path: Path, text: str) -> tuple[ApiKey, ...]:
    file = path / "keys.yaml"
    file.write_text(text)
    return read_keys(file)


def test_an_entry_needs_a_name_and_a_digest_and_json_is_yaml(tmp_path: Path) -> None:
    (key,) = keys_of(tmp_path, f"- name: alice\n  sha256: {DIGEST}\n")
    assert key == ApiKey(name="alice", sha256=DIGEST, role=Role.USER)
    assert (key.concurrency, key.requests_per_minute, key.tokens_per_minute) == (None, None, None)
    text = (
        f'[{{"name": "alice", "sha256": "{DIGEST}", "role": "admin", "concurrency": 1}},\n'
        f' {{"name": "bob", "sha256": "{OTHER_DIGEST}", "tokens_per_minute": 2}}]'
    )
    alice, bob = keys_of(tmp_path, text)
    assert (alice.role, alice.concurrency) == (Role.ADMIN, 1)
    assert (bob.role, bob.tokens_per_minute) == (Role.USER, 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no keys; `rootstock key NAME >> "),
        ("[]", "has no keys"),
        ("name: alice", "must be a list"),
        ("- [", "not valid YAML"),
        ("- alice", "key 1: must be a mapping"),
        (f"- name: alice\n  sha256: {DIGEST}\n- name: bob", "key 2: sha256: is missing"),
        (f"- sha256: {DIGEST}", "key 1: name: is missing"),
        (f"- name: two words\n  sha256: {DIGEST}", "key 1: name: "),
        (f'- name: "a\\0"\n  sha256: {DIGEST}', "key 1: name: "),
        ("- name: alice\n  sha256: sk-secret", "key 1: sha256: "),
        (f"- name: alice\n  sha256: {DIGEST.upper()}", "key 1: sha256: "),
        (f"- name: alice\n  sha256: {DIGEST}\n  role: root", "'user' or 'admin'"),
        (f"- name: alice\n  sha256: {DIGEST}\n  concurrency: 0", "concurrency: must be at least 1"),
        (f"- name: alice\n  sha256: {DIGEST}\n  rpm: 1", "rpm: there is no such field"),
        (f"- name: api_key\n  sha256: {DIGEST}", "the name api_key"),
        (f"- name: a\n  sha256: {DIGEST}\n- name: a\n  sha256: {OTHER_DIGEST}", "2: this name"),
        (f"- name: a\n  sha256: {DIGEST}\n- name: b\n  sha256: {DIGEST}", "2: this sha256"),
        ("- {}\n" * (MAX_KEYS + 1), f"at most {MAX_KEYS}"),
    ],
)
def test_what_is_wrong_is_said_and_where(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(KeyFileError) as caught:
        keys_of(tmp_path, text)
    assert problem in str(caught.value)
    assert "keys.yaml" in str(caught.value)
    assert "sk-secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_an_error_of_the_settings(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({"api_keys_file": tmp_path / "none.yaml"})
    (line,) = str(caught.value).splitlines()
    assert line.startswith("api_keys_file: cannot read ")
    assert line.endswith("none.yaml: No such file or directory")


def test_a_file_of_keys_lets_the_daemon_listen_to_other_machines(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"- name: alice\n  sha256: {DIGEST}\n")
    settings = load_settings({"host": "0.0.0.0", "api_keys_file": path})
    assert [key.name for key in settings.keys.keys] == ["alice"]


def test_the_setting_and_the_file_add_up(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"- name: alice\n  sha256: {DIGEST}\n")
    keys = load_settings({"api_key": "own", "api_keys_file": path}).keys
    assert [(key.name, key.role) for key in keys.keys] == [("api_key", "admin"), ("alice", "user")]
    assert keys.identifies_clients
    assert not load_settings({"api_key": "own"}).keys.identifies_clients


def test_keys_are_found_by_what_was_sent_and_nothing_else() -> None:
    alice, bob = new_secret(), new_secret()
    keys = [ApiKey(name=name, sha256=digest_of(key)) for name, key in (("a", alice), ("b", bob))]
    empty = ApiKey(name="empty", sha256=digest_of(""))
    keyring = Keyring([*keys, empty])
    assert [keyring.find(secret.encode()) for secret in (alice, bob)] == keys
    for wrong in ("", alice[:-1], f"{alice} ", alice.upper(), keys[0].sha256):
        assert keyring.find(wrong.encode()) is None


def test_the_command_makes_a_key_and_its_entry(tmp_path: Path) -> None:
    made = CliRunner().invoke(
        app, ["key", "alice", "--role", "admin", "--concurrency", "2", "--tokens-per-minute", "9"]
    )
    assert made.exit_code == 0
    (key,) = keys_of(tmp_path, made.stdout)
    assert key == ApiKey(
        name="alice", sha256=key.sha256, role=Role.ADMIN, concurrency=2, tokens_per_minute=9
    )
    secret = made.stderr.split()[-1]
    assert Keyring([key]).find(secret.encode()) == key
    assert secret not in made.stdout


def test_entries_can_be_put_behind_each_other(tmp_path: Path) -> None:
    keys = tuple(ApiKey(name=name, sha256=digest_of(name)) for name in ("alice", "bob"))
    assert keys_of(tmp_path, "".join(map(entry_text, keys))) == keys


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["two words"], "NAME: must be 1 to 64 letters, digits, . _ @ and -, a letter or digit"),
        (["two words"], ", not 'two words'"),
        (["alice", "--tokens-per-minute", "0"], "--tokens-per-minute: must be at least 1, not 0"),
    ],
)
def test_the_command_refuses_what_the_file_would_not_take(
    arguments: list[str], problem: str
) -> None:
    made = CliRunner().invoke(app, ["key", *arguments])
    assert made.exit_code == 2
    assert problem in made.stderr.splitlines()[-1]
    assert made.stdout == ""


def limits(**given: int) -> KeyLimits:
    return KeyLimits(ApiKey(name="a", sha256=digest_of("a"), **given))


@asynccontextmanager
async def held(limits: KeyLimits, record: RequestRecord) -> AsyncIterator[None]:
    """As long as a request lasts."""
    async with record.held:
        await record.held.enter_async_context(limits.hold(record))
        yield


async def ask(limits: KeyLimits, tokens: int = 0) -> None:
    record = RequestRecord("r", Principal("a"))
    async with held(limits, record):
        record.tokens = tokens


async def refusal(limits: KeyLimits) -> LimitReached:
    with pytest.raises(LimitReached) as caught:
        await ask(limits)
    return caught.value


def retry_after_seconds(spent: LimitReached) -> int:
    return int(spent.headers["Retry-After"])


async def test_without_limits_there_are_none() -> None:
    for _ in range(1000):
        await ask(limits(), tokens=10**9)


async def test_so_many_at_a_time() -> None:
    two = limits(concurrency=2)
    async with held(two, RequestRecord("1", Principal("a"))):
        async with held(two, RequestRecord("2", Principal("a"))):
            spent = await refusal(two)
        await ask(two)
    assert (spent.limit, retry_after_seconds(spent)) == ("concurrency", 1)
    assert str(spent) == "The limit of this API key is 2 requests at a time."


async def test_what_goes_on_behind_its_request_keeps_its_place() -> None:
    one = limits(concurrency=1)
    record = RequestRecord("r", Principal("a"))
    async with held(one, record):
        goes_on = record.held.pop_all()
    await refusal(one)
    await goes_on.aclose()
    await ask(one)


async def test_a_request_that_fails_gives_its_place_back_and_pays_for_what_it_had() -> None:
    both = limits(concurrency=1, tokens_per_minute=10)
    for tokens in (4, 4, 4):
        record = RequestRecord("r", Principal("a"), tokens=tokens)
        with pytest.raises(ZeroDivisionError):
            async with held(both, record):
                raise ZeroDivisionError
    assert (await refusal(both)).limit == "tokens_per_minute"


async def test_so_many_a_minute() -> None:
    three = limits(requests_per_minute=3)
    for _ in range(3):
        await ask(three)
    spent = await refusal(three)
    assert spent.limit == "requests_per_minute"
    assert 1 <= retry_after_seconds(spent) <= 60
    assert "3 requests a minute" in str(spent)


async def test_tokens_are_charged_at_the_end_and_let_in_while_any_are_left() -> None:
    ten = limits(tokens_per_minute=10)
    await ask(ten, tokens=9)
    await ask(ten, tokens=10**6)
    spent = await refusal(ten)
    assert spent.limit == "tokens_per_minute"
    assert 1 <= retry_after_seconds(spent) <= 60
    assert "10 tokens a minute" in str(spent)


async def test_who_is_refused_for_one_limit_does_not_pay_for_another() -> None:
    both = limits(concurrency=1, requests_per_minute=2)
    async with held(both, RequestRecord("1", Principal("a"))):
        for _ in range(5):
            assert (await refusal(both)).limit == "concurrency"
    await ask(both)
    assert (await refusal(both)).limit == "requests_per_minute"
    spent = limits(concurrency=1, tokens_per_minute=1)
    await ask(spent, tokens=1)
    for _ in range(3):  # and gives back what it had taken of the first
        assert (await refusal(spent)).limit == "tokens_per_minute"


async def test_each_key_has_its_own() -> None:
    one, other = limits(requests_per_minute=1), limits(requests_per_minute=1)
    await ask(one)
    await refusal(one)
    await ask(other)


@pytest.mark.parametrize(
    ("allowed", "origin"),
    [
        ("https://chat.example.org", "https://chat.example.org"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("app://*", "app://obsidian.md"),
        ("file://*", "file://"),
        ("tauri://*", "tauri://localhost"),
        ("vscode-webview://*", "vscode-webview://0a1b2c"),
        ("vscode-file://*", "vscode-file://vscode-app"),
        ("capacitor://localhost", "capacitor://localhost"),
        ("*", "https://any.example"),
        ("*", "null"),
    ],
)
def test_allowed(allowed: str, origin: str) -> None:
    assert is_origin(allowed)
    assert Origins([allowed]).has(origin)
    assert Origins(["https://other.example", allowed]).has(origin)
    assert not Origins(["https://other.example"]).has(origin)
    assert not Origins([]).has(origin)


@pytest.mark.parametrize(
    ("allowed", "origin"),
    [
        ("https://chat.example.org", "http://chat.example.org"),
        ("https://chat.example.org", "https://chat.example.org:8443"),
        ("https://chat.example.org", "https://chatXexample.org"),
        ("https://chat.example.org", "https://chat.example.org.evil.example"),
        ("https://chat.example.org", "https://evil.example/https://chat.example.org"),
        ("app://*", "https://app://x"),
        ("app://*", "null"),
    ],
)
def test_not_allowed(allowed: str, origin: str) -> None:
    assert not Origins([allowed]).has(origin)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "example.org",
        "https://",
        "https://a/",
        "https://A.example",
        "https://*",
        "null",
        "x://*",
    ],
)
def test_what_no_browser_sends_is_refused(text: str) -> None:
    assert not is_origin(text)


def test_an_origin_without_a_name_is_not_that_of_a_nameless_host() -> None:
    assert not is_own("null", "http", "")
    assert not is_own("", "http", "")
    assert not Origins([]).has("")


@pytest.mark.parametrize(
    ("origin", "scheme", "host"),
    [
        ("http://localhost:8000", "http", "localhost:8000"),
        ("http://[::1]:8000", "http", "[::1]:8000"),
        ("http://Example.org", "http", "example.ORG"),
        ("http://example.org", "http", "example.org:80"),
        ("http://example.org:80", "http", "example.org"),
        ("https://example.org", "https", "example.org"),
        ("https://example.org", "https", "example.org:443"),
        ("https://example.org:8443", "https", "example.org:8443"),
        ("https://example.org", "http", "example.org"),  # through a proxy that ends TLS
    ],
)
def test_a_page_of_the_daemon_is_its_own(origin: str, scheme: str, host: str) -> None:
    assert is_own(origin, scheme, host)


@pytest.mark.parametrize(
    ("origin", "scheme", "host"),
    [
        ("http://localhost:3000", "http", "localhost:8000"),
        ("http://localhost", "http", "localhost:8000"),
        ("http://localhost:8000", "http", "localhost"),
        ("https://localhost:8000", "http", "localhost:8000"),
        ("https://localhost", "http", "localhost:443"),
        ("http://example.org", "https", "example.org"),
        ("http://example.org:443", "https", "example.org"),
        ("ftp://localhost:8000", "http", "localhost:8000"),
        ("app://localhost:8000", "http", "localhost:8000"),
        ("file://localhost:8000", "http", "localhost:8000"),
        ("file://", "http", ""),
        ("null", "http", "null"),
        ("http://user@localhost:8000", "http", "user@localhost:8000"),
        ("http://user@localhost:8000", "http", "localhost:8000"),
        ("http://localhost:8000/path", "http", "localhost:8000"),
        ("http://localhost:8000.evil.example", "http", "localhost:8000"),
        ("http://evil.example", "http", "localhost"),
        ("http://[::1]:8000", "http", "[::2]:8000"),
        ("http://[", "http", "["),
        ("localhost:8000", "http", "localhost:8000"),
    ],
)
def test_other_pages_are_not_its_own(origin: str, scheme: str, host: str) -> None:
    assert not is_own(origin, scheme, host)


def test_any_page_may_ask_only_where_there_are_keys() -> None:
    with pytest.raises(SettingsError, match="needs API keys"):
        load_settings({"cors_origin": "*"})
    assert load_settings({"cors_origin": "*", "api_key": "k"}).cors_origin == ("*",)
