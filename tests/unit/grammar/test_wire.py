"""Frames: cut anywhere they arrive whole, and what makes no sense is said to make none."""

import json
import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.grammar.remote.wire import (
    Ahead,
    Answered,
    Mask,
    Report,
    Said,
    ahead_frame,
    mask_frame,
    read_report,
    read_request,
    report_frame,
    request_frame,
)
from engine.process.sockets import MAX_FRAME_BYTES, FrameBuffer, ProtocolError

MASKS = st.builds(
    Mask,
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.floats(0, 100),
    st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
    st.binary(max_size=64),
)
NUMBERS = st.integers(0, 2**64 - 1)
AHEADS = st.builds(
    Ahead, NUMBERS, NUMBERS, st.floats(0, 100), st.booleans(), st.binary(max_size=64)
)
FIELDS = st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=8), max_size=3)
IN_JSON = [one for one in Said if one not in {Said.MASK, Said.AHEAD}]
REPORTS = st.builds(Report, st.sampled_from(IN_JSON), FIELDS)


def framed(one: Answered | Report) -> bytes:
    match one:
        case Mask():
            return mask_frame(one)
        case Ahead():
            return ahead_frame(one)
        case Report(said, fields):
            return report_frame(said, fields)


@given(st.lists(MASKS | AHEADS | REPORTS, max_size=6), st.lists(st.integers(0, 400)))
def test_frames_arrive_whole_wherever_they_are_cut(
    said: list[Answered | Report], cuts: list[int]
) -> None:
    data = b"".join(map(framed, said))
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    buffer = FrameBuffer()
    heard = [
        read_report(body) for start, end in pairwise(bounds) for body in buffer.add(data[start:end])
    ]
    assert heard == said


@given(FIELDS)
def test_requests_arrive_as_they_were(fields: dict[str, int | str]) -> None:
    (body,) = FrameBuffer().add(request_frame(fields))
    assert read_request(body) == fields


def test_half_a_character_is_no_reason_to_fail() -> None:
    (body,) = FrameBuffer().add(request_frame({"text": "\ud800"}))
    assert read_request(body) == {"text": "\ud800"}


def test_a_frame_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError, match="a frame of"):
        FrameBuffer().add(struct.pack("<I", MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x63{}",
        bytes([Said.MASK]) + b"short",
        bytes([Said.MASK]) + bytes(20) + b"\xff\xff\xff\xff",
        bytes([Said.AHEAD]) + b"short",
        bytes([Said.BEGUN]),
        bytes([Said.FAILED]) + b"{",
        bytes([Said.FAILED]) + b"[]",
        bytes([Said.FAILED]) + b"\xff",
        bytes([Said.FAILED]) + 100_000 * b"[",
    ],
)
def test_what_makes_no_sense_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_report(body)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_report_or_a_protocol_error(body: bytes) -> None:
    try:
        said = read_report(body)
    except ProtocolError:
        return
    assert isinstance(said, Mask | Ahead) or json.dumps(said.fields)
