"""Arguments of calls in dialects that have to send an object: nothing that is written is lost."""

import logging

import pytest

from server.dialects.job import as_arguments
from server.generation.tools import UNREADABLE


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", {}),
        ("{}", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1, "b": "x', {"a": 1}),
        ('{"a": 1, "b": [1, 2', {"a": 1, "b": [1, 2]}),
    ],
)
def test_an_object_is_sent_as_far_as_it_goes(text: str, arguments: object) -> None:
    assert as_arguments(text) == arguments


@pytest.mark.parametrize("text", ["now", "[1]", '"text"', "{'a': 1}", "12"])
def test_what_is_no_object_is_sent_as_text_and_logged(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rootstock.dialects"):
        assert as_arguments(text) == {UNREADABLE: text}
    assert "no JSON object" in caplog.text
