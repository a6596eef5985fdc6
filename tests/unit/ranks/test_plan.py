"""Plans and masks survive their frames, and other bytes are refused."""

from contextlib import suppress
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.step import (
    BatchEntry,
    Decode,
    DraftPlan,
    Prefill,
    Resample,
    Row,
    Sampling,
    Score,
    SequenceId,
    StepMasks,
    StepPlan,
    Verify,
)
from engine.mlx_backend.ranks.plan import (
    Unsendable,
    decode_ids,
    decode_masks,
    decode_plan,
    encode_ids,
    encode_masks,
    encode_plan,
)
from engine.process.sockets import ProtocolError
from engine.values.request import Pooling, SamplingParams
from kvstore.ops import (
    CopyBlock,
    CopyState,
    FillBlock,
    FillState,
    ReadBlock,
    ResetState,
    RollBackState,
    RoundState,
    StepOp,
    TablePatch,
    When,
)
from kvstore.types import BlockId, SlotId

GREEDY = Sampling(SamplingParams(temperature=0.0), 0)

sequence_ids = st.integers(0, 1 << 40).map(SequenceId)
tokens = st.integers(0, (1 << 31) - 1)
positions = st.integers(0, 1 << 22)
blocks = st.integers(0, 1 << 30).map(BlockId)
slots = st.integers(0, 1 << 30).map(SlotId)
groups = st.none() | st.integers(0, 7)
token_tuples = st.lists(tokens, max_size=40).map(tuple)

ops = st.one_of(
    st.builds(CopyBlock, blocks, blocks, positions, groups),
    st.builds(CopyState, slots, slots),
    *(st.builds(op, slots) for op in (ResetState, RoundState, RollBackState)),
)


@st.composite
def prefills(draw: st.DrawFn) -> Prefill:
    own = draw(token_tuples)
    n_scored = draw(st.none() | st.integers(0, len(own)))
    score = None if n_scored is None else Score((0,) * n_scored, 0)
    pooling = draw(st.none() | st.sampled_from(Pooling))
    return Prefill(draw(sequence_ids), draw(positions), own, draw(st.booleans()), score, pooling)


rows: st.SearchStrategy[Row] = st.one_of(
    st.builds(Decode, sequence_ids),
    st.builds(Verify, sequence_ids, positions, tokens, token_tuples),
    st.builds(Resample, sequence_ids),
    prefills(),
)
patches = st.builds(TablePatch, groups, positions, st.lists(blocks, max_size=40).map(tuple))
plans = st.builds(
    StepPlan,
    number=st.integers(0, 1 << 40),
    leave=st.lists(sequence_ids, max_size=4),
    enter=st.lists(
        st.builds(BatchEntry, sequence_ids, st.just(GREEDY), st.text(max_size=9)), max_size=4
    ),
    patches=st.lists(st.tuples(sequence_ids, patches), max_size=4),
    rows=st.lists(rows, max_size=6),
    ops=st.lists(st.tuples(st.sampled_from(When), ops), max_size=6),
)


@given(plans)
def test_a_plan_survives(plan: StepPlan) -> None:
    found = decode_plan(encode_plan(plan))
    assert found == plan
    assert list(map(type, found.rows)) == list(map(type, plan.rows))


@given(rows, st.text(max_size=5), st.integers(0, 9))
def test_what_rank_0_keeps(row: Row, prompt: str, seed: int) -> None:
    """Parameters, prompts and tokens to score are not sent."""
    entry = BatchEntry(SequenceId(1), Sampling(SamplingParams(temperature=0.7), seed))
    sent = encode_plan(StepPlan(enter=[entry], rows=[row]))
    assert sent == encode_plan(StepPlan(enter=[replace(entry, sampling=GREEDY)], rows=[row]))
    scored = Prefill(SequenceId(1), 0, (5, 6), score=Score((6, 7), 3))
    assert decode_plan(encode_plan(StepPlan(rows=[scored]))).rows == [
        scored._replace(score=Score((0, 0), 0))
    ]


@given(st.lists(sequence_ids), st.lists(sequence_ids))
def test_masks_survive(masked: list[SequenceId], late: list[SequenceId]) -> None:
    found = decode_masks(encode_masks(StepMasks(masked, late=late)))
    assert (list(found.sequence_ids), list(found.late)) == (masked, late)
    assert not len(found.masks)


@given(st.lists(st.lists(blocks, max_size=50), max_size=4))
def test_ids_survive(ids: list[list[int]]) -> None:
    assert decode_ids(encode_ids(*ids)) == ids


@given(plans, st.data())
def test_a_truncated_frame(plan: StepPlan, data: st.DataObject) -> None:
    sent = encode_plan(plan)
    n_bytes = data.draw(st.integers(0, len(sent) - 1))
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode_plan(sent[:n_bytes])


@given(plans, st.data())
def test_a_changed_frame(plan: StepPlan, data: st.DataObject) -> None:
    """It is another plan, or none."""
    sent = bytearray(encode_plan(plan))
    for at in data.draw(st.lists(st.integers(0, len(sent) - 1), min_size=1, max_size=4)):
        sent[at] = data.draw(st.integers(0, 255))
    with suppress(ProtocolError):
        decode_plan(bytes(sent))


@given(st.binary(max_size=60))
def test_other_bytes(data: bytes) -> None:
    for decode in decode_plan, decode_masks, decode_ids:
        with suppress(ProtocolError):
            decode(data)


@pytest.mark.parametrize(
    ("row", "op"),
    [
        ([-1, 5], None),
        ([9, 5], None),
        (["0", 5], None),
        ([], None),
        ([0, "5"], None),
        ([0], None),
        ([1, 5, 0, 7, "text"], None),
        ([3, 5, 0, b"123", False, -1, None], None),  # no whole number of tokens
        ([3, 5, 0, b"", False, -1, "median"], None),
        ([3, 5, 0, b"1234", False, 2, None], None),  # two scores of one token
        (None, [0, -1, 5]),
        (None, [0, 5, 5]),
        (None, [4, 1, 5]),
        (None, [0, 1, None]),
        (None, [0, 1, 5, 6]),
    ],
)
def test_a_wrong_row_or_op(row: list[object] | None, op: list[object] | None) -> None:
    frame: tuple[object, ...] = (
        0,
        [],
        [],
        [],
        [] if row is None else [row],
        [] if op is None else [op],
    )
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode_plan(msgspec.msgpack.encode(frame))


@pytest.mark.parametrize(
    "op",
    [
        (When.FIRST, FillBlock(BlockId(1), b"")),
        (When.FIRST, FillState(SlotId(1), b"")),
        (When.READ, ReadBlock(BlockId(1), 1)),
    ],
)
def test_bytes_are_not_sent(op: StepOp) -> None:
    with pytest.raises(Unsendable, match="whose bytes differ between ranks"):
        encode_plan(StepPlan(ops=[op]))


def test_images_and_drafts_are_not_sent() -> None:
    for plan in StepPlan(forget=[b"image"]), StepPlan(draft=DraftPlan()):
        with pytest.raises(Unsendable, match="images or a draft model"):
            encode_plan(plan)


def test_a_frame_is_small() -> None:
    assert len(encode_plan(StepPlan(7, rows=[Decode(SequenceId(3))]))) < 20
    decodes: list[Row] = [Decode(SequenceId(i)) for i in range(32)]
    assert len(encode_plan(StepPlan(7, rows=decodes))) < 200
    prompt = Prefill(SequenceId(9), 0, tuple(range(512)))
    assert len(encode_plan(StepPlan(7, rows=[prompt, *decodes[:8]]))) < 2_300
