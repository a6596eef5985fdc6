"""Errors in a report that is sent to somebody."""

import pytest

from engine.api import ModelError
from measuring.doctor import reason


@pytest.fixture(autouse=True)
def somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    monkeypatch.setattr("platform.node", lambda: "engine.local")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            FileNotFoundError(2, "No such file or directory", "/Users/ada/models/x"),
            "FileNotFoundError: [Errno 2] No such file or directory: ...",
        ),
        (ModelError("org/model is not here"), "ModelError: ... is not here"),
        (ModelError("C:\\ada\\model is a file"), "ModelError: ... is a file"),
        (RuntimeError("of Ada on engine.local, engine"), "RuntimeError: of ... on ..., ..."),
        (RuntimeError("an adapter of engines"), "RuntimeError: an adapter of engines"),
        (KeyError("layers"), "KeyError: 'layers'"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_no_path_and_no_name_is_said(error: Exception, said: str) -> None:
    assert reason(error) == said


def test_a_user_without_a_name_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_user() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr("getpass.getuser", no_user)
    assert reason(RuntimeError("it failed")) == "RuntimeError: it failed"
