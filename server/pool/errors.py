"""Why a request does not get its model."""


class PoolError(Exception):
    """Base of them."""


class NeverFits(PoolError):
    """The model needs more memory than there would be with nothing else loaded."""

    def __init__(self, need_bytes: int, budget_bytes: int) -> None:
        super().__init__(
            f"it needs {need_bytes / 2**30:.1f} GiB of memory, and all models together may take "
            f"{budget_bytes / 2**30:.1f} GiB (memory_budget), those that are pinned included"
        )


class LoadFailed(PoolError):
    """It was tried, and is tried again when asked for after `retry_after_seconds`."""

    def __init__(self, reason: str, retry_after_seconds: float) -> None:
        super().__init__(reason)
        self.retry_after_seconds = retry_after_seconds


class WaitedTooLong(PoolError):
    """The model was not ready in time."""

    def __init__(self, waited_seconds: float) -> None:
        super().__init__(f"it was not ready within {waited_seconds:g} s (load_timeout_seconds)")


class PoolClosed(PoolError):
    """The server stops."""

    def __init__(self) -> None:
        super().__init__("the server is stopping")
