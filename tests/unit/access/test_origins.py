"""Which web pages may ask."""

import pytest

from server.access.origins import Origins, is_origin, is_own
from server.settings import SettingsError, load_settings


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
    assert not is_own("null", "")
    assert not is_own("", "")
    assert not Origins([]).has("")


def test_any_page_may_ask_only_where_there_are_keys() -> None:
    with pytest.raises(SettingsError, match="needs API keys"):
        load_settings({"cors_origin": "*"})
    assert load_settings({"cors_origin": "*", "api_key": "k"}).cors_origin == ("*",)
