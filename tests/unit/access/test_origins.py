"""Which web pages may ask."""

import pytest

from server.access.web import Origins, is_origin, is_own
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
