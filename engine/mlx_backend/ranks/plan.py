"""Frames between the ranks of a model: a byte that says what it is, and MessagePack.

Rank 0 sends each call of its runner to the other ranks. Sampling parameters, masks and tokens to
score stay on rank 0: what the others need of them is which rows draw, and how often.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from enum import IntEnum
from typing import Any, TypeAlias, TypeVar, get_type_hints

import msgspec
import numpy as np

from engine.core.step import (
    NO_MASKS,
    NO_STEP_MASKS,
    BatchEntry,
    Decode,
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
from engine.process.sockets import ProtocolError
from engine.values.request import Pooling, SamplingParams
from kvstore.ops import (
    CopyBlock,
    CopyState,
    ResetState,
    RollBackState,
    RoundState,
    StorageOp,
    TablePatch,
    When,
)


class Frame(IntEnum):
    """The first byte of a frame."""

    BEAT = 0  # the sender runs; sent at regular intervals, either way
    SUBMIT = 1  # with a plan
    LAUNCH = 2
    DRAW = 3  # with masks, as far as other ranks need them
    COLLECT = 4
    RESIZE = 5  # the storage, while nothing is computed
    SHRINK = 6  # with the blocks that are free
    GIVE_BACK = 7  # with blocks, and slots of each group
    SETUP = 8  # what a rank loads, before anything is loaded
    FACTS = 9  # a rank's versions and weights
    FORM = 10  # the addresses of all ranks
    AGREE = 11  # a rank's numbers; rank 0 answers with the least of all ranks
    FAILED = 12  # a rank's error, after which it ends


class Unsendable(Exception):
    """A plan has something that other ranks cannot compute."""


_ROWS: tuple[type[Any], ...] = (Decode, Verify, Resample)
_OPS = (CopyBlock, ResetState, CopyState, RoundState, RollBackState)
_OP_VALUES: list[Any] = [tuple[tuple(get_type_hints(op).values())] for op in _OPS]  # type: ignore[misc]
_PREFILL = len(_ROWS)
_NOT_SCORED = -1

_GREEDY = Sampling(SamplingParams(temperature=0.0), 0)

_Plan: TypeAlias = tuple[
    int,
    list[int],
    list[tuple[int, str]],
    list[tuple[int, int | None, int, tuple[int, ...]]],
    list[list[Any]],
    list[list[Any]],
]

_PrefillValues: TypeAlias = tuple[SequenceId, int, bytes, bool, int, Pooling | None]

T = TypeVar("T")

_PLAN = msgspec.msgpack.Decoder(_Plan)
_MASKS = msgspec.msgpack.Decoder(tuple[list[int], list[int]])
_IDS = msgspec.msgpack.Decoder(list[bytes])
_ENCODER = msgspec.msgpack.Encoder()


def encode_plan(plan: StepPlan) -> bytes:
    """A plan for other ranks. Raises Unsendable for one with images, a draft model's part, or
    blocks that are read or filled in: their bytes differ between ranks.
    """
    if plan.encode or plan.forget or plan.draft is not None:
        raise Unsendable("a plan has images or a draft model's part")
    ops = list[tuple[int, ...]]()
    for when, op in plan.ops:
        if type(op) not in _OPS:
            raise Unsendable(f"a plan has a {type(op).__name__}, whose bytes differ between ranks")
        values = (getattr(op, each.name) for each in fields(op))
        ops.append((int(when), _OPS.index(type(op)), *values))
    return _ENCODER.encode(
        (
            plan.number,
            plan.leave,
            [(entry.sequence_id, entry.adapter) for entry in plan.enter],
            [(id, patch.group, patch.first, patch.ids) for id, patch in plan.patches],
            [_encode_row(row) for row in plan.rows],
            ops,
        )
    )


def decode_plan(data: bytes) -> StepPlan:
    """The plan of a frame: what `encode_plan` was given, with greedy sampling, and with zeros as
    tokens to score. Raises ProtocolError for anything else.
    """
    return _decoded(_plan_of, data)


def encode_masks(masks: StepMasks) -> bytes:
    """Which draws of a step have masks, and which rows draw later; nothing where no row has any."""
    if not masks.sequence_ids and not masks.late:
        return b""
    return _ENCODER.encode((list(masks.sequence_ids), list(masks.late)))


def decode_masks(data: bytes) -> StepMasks:
    """What `encode_masks` was given, without the masks. Raises ProtocolError for anything else."""
    if not data:
        return NO_STEP_MASKS
    ids, late = _decoded(_MASKS.decode, data)
    return StepMasks(list(map(SequenceId, ids)), NO_MASKS, list(map(SequenceId, late)))


def encode_ids(*ids: Sequence[int]) -> bytes:
    """Lists of ids of blocks and slots, of which there may be 100,000."""
    return _ENCODER.encode([np.asarray(each, "<u4").tobytes() for each in ids])


def decode_ids(data: bytes) -> list[list[int]]:
    """What `encode_ids` was given. Raises ProtocolError for anything else."""
    return _decoded(lambda it: [_unpacked(each) for each in _IDS.decode(it)], data)


def _decoded(decode: Callable[[bytes], T], data: bytes) -> T:
    try:
        return decode(data)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"a frame between ranks cannot be read: {error}") from error


def _plan_of(data: bytes) -> StepPlan:
    number, leave, enter, patches, rows, ops = _PLAN.decode(data)
    return StepPlan(
        number,
        list(map(SequenceId, leave)),
        [BatchEntry(SequenceId(id), _GREEDY, adapter) for id, adapter in enter],
        [(SequenceId(id), TablePatch(group, first, ids)) for id, group, first, ids in patches],
        [_decode_row(*row) for row in rows],
        [(When(when), _decode_op(kind, values)) for when, kind, *values in ops],
    )


def _encode_row(row: Row) -> tuple[Any, ...]:
    if not isinstance(row, Prefill):
        return (_ROWS.index(type(row)), *row)
    tokens = np.asarray(row.tokens, "<u4").tobytes()
    n_scored = _NOT_SCORED if row.score is None else len(row.score.next_tokens)
    return (_PREFILL, row.sequence_id, row.start, tokens, row.samples, n_scored, row.pooling)


def _decode_row(kind: int, *values: Any) -> Row:
    if kind != _PREFILL:
        row: Row = msgspec.convert(values, _of_kind(_ROWS, kind))
        return row
    id, start, packed, samples, n_scored, pooling = msgspec.convert(values, _PrefillValues)
    tokens = tuple(_unpacked(packed))
    if n_scored > len(tokens):
        raise ValueError(f"{n_scored} scores of {len(tokens)} tokens")
    score = None if n_scored == _NOT_SCORED else Score((0,) * n_scored, 0)
    return Prefill(id, start, tokens, samples, score, pooling)


def _decode_op(kind: int, values: list[Any]) -> StorageOp:
    op: StorageOp = _of_kind(_OPS, kind)(*msgspec.convert(values, _OP_VALUES[kind]))
    return op


def _of_kind(types: Sequence[type[Any]], kind: int) -> type[Any]:
    if kind not in range(len(types)):
        raise ValueError(f"{kind!r} is no kind of row or operation")
    return types[kind]


def _unpacked(ids: bytes) -> list[int]:
    unpacked: list[int] = np.frombuffer(ids, "<u4").tolist()
    return unpacked
