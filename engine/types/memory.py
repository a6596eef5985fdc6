"""What the process takes of the machine's memory, beside what loading has promised."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryPromise:
    """What was reckoned with when the model was found to fit. Bytes."""

    weights: int
    storage: int  # arenas, and as many states as there may be
    workspace: int  # of a step, and what the process grows by

    @property
    def kept(self) -> int:
        """What is there between steps."""
        return self.weights + self.storage


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """The first three are of MLX's allocator. Bytes."""

    active: int
    cached: int  # buffers that nobody uses, for the next step
    peak: int  # of `active`, since the model was loaded
    resident: int  # of the whole process, as the system counts
    promise: MemoryPromise
