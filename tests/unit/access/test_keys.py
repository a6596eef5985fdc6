"""The file of keys, and what a key is compared with."""

from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner

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
from server.settings import SettingsError, load_settings
from server.terminal.cli import app

DIGEST = sha256(b"alice's").hexdigest()
OTHER_DIGEST = sha256(b"bob's").hexdigest()


def keys_of(path: Path, text: str) -> tuple[ApiKey, ...]:
    file = path / "keys.yaml"
    file.write_text(text)
    return read_keys(file)


def test_an_entry_needs_a_name_and_a_digest(tmp_path: Path) -> None:
    (key,) = keys_of(tmp_path, f"- name: alice\n  sha256: {DIGEST}\n")
    assert key == ApiKey(name="alice", sha256=DIGEST, role=Role.USER)
    assert (key.concurrency, key.requests_per_minute, key.tokens_per_minute) == (None, None, None)


def test_json_is_yaml(tmp_path: Path) -> None:
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
        ("- alice", "key 1: "),
        (f"- name: alice\n  sha256: {DIGEST}\n- name: bob", "key 2: sha256: Field required"),
        (f"- sha256: {DIGEST}", "key 1: name: Field required"),
        (f"- name: two words\n  sha256: {DIGEST}", "key 1: name: "),
        (f'- name: "a\\0"\n  sha256: {DIGEST}', "key 1: name: "),
        ("- name: alice\n  sha256: sk-secret", "key 1: sha256: "),
        (f"- name: alice\n  sha256: {DIGEST.upper()}", "key 1: sha256: "),
        (f"- name: alice\n  sha256: {DIGEST}\n  role: root", "'user' or 'admin'"),
        (f"- name: alice\n  sha256: {DIGEST}\n  concurrency: 0", "concurrency: "),
        (f"- name: alice\n  sha256: {DIGEST}\n  rpm: 1", "rpm: Extra inputs"),
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
        (["alice", "--tokens-per-minute", "0"], "--tokens-per-minute: Input should be greater"),
    ],
)
def test_the_command_refuses_what_the_file_would_not_take(
    arguments: list[str], problem: str
) -> None:
    made = CliRunner().invoke(app, ["key", *arguments])
    assert made.exit_code == 2
    assert problem in made.stderr.splitlines()[-1]
    assert made.stdout == ""
