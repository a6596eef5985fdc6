"""The sections in their order. What takes longest comes last, with all the time that is left."""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.mlx_backend.command_buffers import MAX_OPERATIONS

BUFFER_OPERATIONS = (50, 200, 2000)
"""The limits on a command buffer's operations that are compared. MLX's own are 20 to 100."""


@dataclass(frozen=True, slots=True)
class SectionPlan:
    name: str
    weight: float  # its share of the time, beside those that come after it
    about: str
    variables: tuple[Mapping[str, str], ...] = ()
    """The environment of each case's process, for what MLX reads once. Empty: cases share one."""


SECTIONS = (
    SectionPlan("machine", 3, "The device, and the model of `step` and `memory`."),
    SectionPlan(
        "attention",
        12,
        "One token of each row behind so many others, rows x tokens; 16 heads over 8 KV heads of "
        "128, float32 on a CPU and bfloat16 elsewhere, milliseconds a layer. `contiguous` is MLX's "
        "attention over keys that nobody had to gather, and `times` is over that.",
    ),
    SectionPlan(
        "layouts",
        16,
        "The same attention behind a gather of shuffled blocks, in two layouts of the arena: "
        "`today`, [blocks, heads, block, dim], and `other`, [blocks, block, heads, dim]. `gather` "
        "is the gather alone, and `by row` the attention of one row after the other. `other_times` "
        "below 1: the other layout is faster.",
    ),
    SectionPlan(
        "step",
        15,
        "A decode step of the engine, and of mlx-lm's model over its own caches on the same "
        "weights, rows x tokens before them. `engine_times` is engine over bare.",
    ),
    SectionPlan(
        "memory",
        10,
        "What steps took beside weights and storage, at most since the model was loaded, and what "
        "was promised for them. A prompt alone, then rows beside each other.",
    ),
    SectionPlan(
        "donation",
        4,
        "The arena's growth over twenty steps of which one is in flight while the next is "
        "submitted. `pools_times` of 1 or more: a write has copied a pool. On a CPU steps are "
        "launched ahead, on GPUs when it is idle.",
    ),
    SectionPlan(
        "command buffers",
        12,
        "A decode step of the engine, in milliseconds by rows, where Metal's command buffers and "
        f"CUDA's graphs end after so many operations ({MAX_OPERATIONS}). `taken_mib` is what steps "
        "took at most in addition to weights and storage, `cached_mib` what MLX's buffer cache "
        "held. The section `step` has MLX's own limit. It does not apply to a CPU.",
        tuple({MAX_OPERATIONS: str(operations)} for operations in BUFFER_OPERATIONS),
    ),
    SectionPlan(
        "load check",
        44,
        "Every architecture's tiny random checkpoint through the daemon's check at load: how its "
        "rows share forwards, with which attention, and how far its logits are from those through "
        "mlx-lm's own caches, relative to their size.",
    ),
)
