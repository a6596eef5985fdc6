"""The text of the kernels, as `mx.fast.metal_kernel` and `mx.fast.cuda_kernel` take it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent

INPUTS = ["queries", "keys", "key_scales", "values", "value_scales", "places", "units", "order"]
INPUTS += ["last_seen", "first_keys", "limits"]
OUTPUTS = ["weighted", "stats"]
MERGE_INPUTS = ["weighted", "stats", "first_parts", "parts", "sinks", "limits"]
MERGE_OUTPUTS = ["output"]

_PARTIALS = """
  {shared} int held[MOST_ENTRIES];
  {shared} float exchange[EXCHANGED * VALUE_DIM];
  {shared} float exchange_stats[EXCHANGED * 2];
  paged_partials(
      {group}.x, {group}.y, {thread}.x, ({device} const u32*)queries, ({device} const u32*)keys,
      ({device} const float*)key_scales, ({device} const u32*)values,
      ({device} const float*)value_scales, places, units, order, last_seen, first_keys, limits,
      weighted, stats, held, exchange, exchange_stats);
"""
_MERGE = """
  paged_merge(
      {group}.x, {thread}.x, weighted, stats, first_parts, parts, ({device} const float*)sinks,
      limits, ({device} u16*)output, ({device} float*)output);
"""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The bodies of both passes in the language of a device, and the file of its definitions."""

    partials: str
    merge: str
    file: str


def _dialect(file: str, **terms: str) -> Dialect:
    return Dialect(_PARTIALS.format(**terms), _MERGE.format(**terms), file)


CUDA = _dialect("cuda.h", shared="__shared__", group="blockIdx", thread="threadIdx", device="")
METAL = _dialect(
    "metal.h",
    shared="threadgroup",
    group="threadgroup_position_in_grid",
    thread="thread_position_in_threadgroup",
    device="device",
)


def header(dialect: Dialect, defines: Mapping[str, object]) -> str:
    """What stands before both passes: constants, what the device has for them, and the text."""
    constants = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    return constants + text_of(dialect.file) + text_of("paged.h")


@cache
def source_text() -> str:
    """All that kernels are made of, besides the constants of a kind."""
    return repr((CUDA, METAL)) + "".join(map(text_of, ("cuda.h", "metal.h", "paged.h")))


@cache
def text_of(name: str) -> str:
    """A file without comments: MLX copies the text at each call."""
    text = (HERE / name).read_text(encoding="utf-8")
    return re.sub(r"^[ ]*//.*\n|[ ]+//.*$", "", text, flags=re.MULTILINE)
