"""The process's memory, and what it was predicted to be when the model was loaded."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryPromise:
    """The prediction by which the model was found to fit. Bytes."""

    weights: int
    storage: int  # arenas, and as many states as there may be
    workspace: int  # of a step, and what the process grows by
    cache: int  # what MLX's buffer cache keeps in addition: 0 where it gives that up for a step

    @property
    def kept(self) -> int:
        """What is in use between steps."""
        return self.weights + self.storage

    @property
    def total(self) -> int:
        return self.kept + self.workspace + self.cache


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """The first three are of MLX's allocator, `active` and `peak` without what it had given out
    before the model. Bytes.
    """

    active: int
    cached: int  # unused buffers, kept for the next step
    peak: int  # of `active`, since the model was loaded
    resident: int  # of the whole process, as the system counts
    promise: MemoryPromise
