"""Seals on summaries: what was sealed is opened, and nothing else is."""

from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from server.errors import ApiError
from server.generation.conversation import Message, digest_of, texts
from server.generation.seals import KEY_FILE, PREFIX, Seals, Summary

SEALS = Seals(lambda: Path(mkdtemp()))
OTHERS = Seals(lambda: Path(mkdtemp()))
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


def summary(text: str) -> Summary:
    return Summary(text, digest_of([Message(role="user", parts=texts(text))]))


def opened(sealed: str) -> Summary | ApiError | None:
    """What it is opened to, or the error."""
    try:
        return SEALS.opened(sealed, "input")
    except ApiError as error:
        return error


def changed(sealed: str, draw: Callable[[int], int]) -> str:
    """The text with one character changed, left out or added."""
    at = draw(len(sealed))
    return sealed[:at] + ["", "A", "=", "_", sealed[at] * 2][draw(5)] + sealed[at + 1 :]


@given(TEXTS)
def test_what_was_sealed_is_opened(text: str) -> None:
    assert SEALS.opened(SEALS.sealed(summary(text)), "input") == summary(text)
    SEALS.check(text, SEALS.signature(text), "input")


@given(TEXTS, st.data())
def test_nothing_else_is(text: str, data: st.DataObject) -> None:
    """Texts changed in one place, of another installation, or sealed for the other purpose. Base64
    may say the same bytes in two ways: then the summary is the same.
    """
    sealed, signed = SEALS.sealed(summary(text)), SEALS.signature(text)
    one_changed = changed(sealed, lambda n: data.draw(st.integers(0, n - 1)))
    for forged in (one_changed, OTHERS.sealed(summary(text)), signed):
        found = opened(forged)
        if isinstance(found, ApiError):
            assert (found.status, found.param) == (400, "input")
            assert found.code == "compaction_signature_invalid"
        else:
            assert forged is one_changed
            assert found in (None, summary(text))


@given(TEXTS, TEXTS)
def test_a_signature_is_of_one_text(text: str, other: str) -> None:
    assume(text != other)
    signed, sealed = SEALS.signature(text), SEALS.sealed(summary(text))
    for signature, said in ((signed, other), (sealed, text), (OTHERS.signature(text), text)):
        with pytest.raises(ApiError) as refused:
            SEALS.check(said, signature, "input")
        assert refused.value.status == 400


@given(st.text() | st.text().map(PREFIX.__add__) | st.binary().map(repr).map(PREFIX.__add__))
def test_hostile_text_is_refused_or_skipped(text: str) -> None:
    found = opened(text)
    assert isinstance(found, ApiError) == text.startswith(PREFIX)
    assert found is None or (isinstance(found, ApiError) and found.status == 400)


def test_two_daemons_of_one_installation_have_one_key(tmp_path: Path) -> None:
    first, second = Seals(lambda: tmp_path), Seals(lambda: tmp_path)
    assert second.opened(first.sealed(summary("one")), "input") == summary("one")
    assert [file.name for file in tmp_path.iterdir()] == [KEY_FILE]


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_a_file_that_is_no_key_is_left_as_it_is(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / KEY_FILE).write_bytes(content)
    seals = Seals(lambda: tmp_path)
    assert seals.opened(seals.sealed(summary("one")), "input") == summary("one")
    assert "ends with this process" in caplog.text
    assert (tmp_path / KEY_FILE).read_bytes() == content


def test_a_key_is_no_link(tmp_path: Path) -> None:
    """Of a folder that others may write to."""
    (tmp_path / "chosen").write_bytes(b"x" * 32)
    (tmp_path / KEY_FILE).symlink_to(tmp_path / "chosen")
    theirs = Seals(lambda: tmp_path / "none")
    sealed = Seals(lambda: tmp_path).sealed(summary("one"))
    with pytest.raises(ApiError):
        theirs.opened(sealed, "input")
