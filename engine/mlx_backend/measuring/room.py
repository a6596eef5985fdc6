"""Whether what a measurement takes is there: on a GPU the process may not survive its lack."""

from engine.mlx_backend import host

_SHARE = 0.8
"""Of what is free: others' memory grows, too."""


class TooLarge(MemoryError):
    """The case takes more memory than is free."""


def require_bytes(n_bytes: int) -> None:
    """Raises TooLarge where so many are not free."""
    left_bytes = host.examine().left_bytes
    if n_bytes > _SHARE * left_bytes:
        raise TooLarge(
            f"it takes {n_bytes / 2**30:.1f} GiB, and {left_bytes / 2**30:.1f} GiB are free"
        )
