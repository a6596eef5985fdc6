"""What a step takes beside weights and storage."""

from engine.values.settings import EngineConfig

_PROCESS_BYTES = 256 << 20
_TOKEN_BYTES = 64 << 10
_LOGIT_BYTES = 50
"""What a step takes at most, from peaks measured on a CPU: 36 MB for a prompt of 512 tokens through
layers 1,024 and 4,096 wide, 470 MB to sample 64 rows of 151,936 logits. The process itself grows by
110 MB between its first look at the memory and its first answer; the rest is for wider layers."""


def working_bytes(config: EngineConfig, vocab_size: int, held_steps: int = 1) -> int:
    """What the process and a step take in addition to weights, storage and attention's workspace.

    `held_steps`: see `allocator.held_steps`.
    """
    return _PROCESS_BYTES + held_steps * step_bytes(config, vocab_size)


def step_bytes(config: EngineConfig, vocab_size: int) -> int:
    """The arrays of a step in addition to weights, storage and attention's workspace."""
    logits = config.max_running * vocab_size
    return config.step_tokens * _TOKEN_BYTES + logits * _LOGIT_BYTES
