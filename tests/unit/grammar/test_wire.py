"""Frames: cut anywhere they arrive whole, and what makes no sense is said to make none."""

import math
import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.grammar.wire import (
    JobReport,
    ReportKind,
    read_report,
    read_request,
    report_frame,
    request_frame,
)
from engine.process.sockets import MAX_FRAME_BYTES, FrameBuffer, ProtocolError

BYTES = st.binary(max_size=64)
SECONDS = st.floats(0, 100)
REPORTS = st.builds(
    JobReport,
    st.sampled_from(ReportKind),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    SECONDS,
    SECONDS,
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
    st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
    BYTES,
    BYTES,
    st.text(max_size=8),
)
FIELDS = st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=8), max_size=3)


def body(report: JobReport) -> bytes:
    (found,) = FrameBuffer().add(report_frame(report))
    return found


@given(st.lists(REPORTS, max_size=6), st.lists(st.integers(0, 400)))
def test_frames_arrive_whole_wherever_they_are_cut(said: list[JobReport], cuts: list[int]) -> None:
    data = b"".join(map(report_frame, said))
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
    (found,) = FrameBuffer().add(request_frame({"text": "\ud800"}))
    assert read_request(found) == {"text": "\ud800"}
    assert read_report(body(JobReport(ReportKind.FAILED, error="\ud800"))).error == "?"


def test_a_frame_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError, match="a frame of"):
        FrameBuffer().add(struct.pack("<I", MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize(
    "nonsense",
    [
        b"",
        bytes([ReportKind.MASK]) + b"short",
        b"\x63" + body(JobReport(ReportKind.MASK))[1:],
        body(JobReport(ReportKind.MASK, mask=b"1234"))[:-1],
        body(JobReport(ReportKind.MASK, forced=(1,)))[:-1],
        body(JobReport(ReportKind.FAILED)) + b"\xff",
        body(JobReport(ReportKind.MASK, seconds=-1.0)),
        body(JobReport(ReportKind.MASK, seconds=math.nan)),
        body(JobReport(ReportKind.MASK, draft_seconds=math.inf)),
    ],
)
def test_what_makes_no_sense_is_a_protocol_error(nonsense: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_report(nonsense)


@given(st.binary(max_size=120))
def test_any_bytes_are_a_report_or_a_protocol_error(data: bytes) -> None:
    try:
        report = read_report(data)
    except ProtocolError:
        return
    assert len(report.mask) + len(report.draft_masks) <= len(data)
