"""The limit of open files, which mlx-lm lowers when it is imported."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def keep_file_limit() -> Iterator[None]:
    """Imports in the body leave the limit alone; no process could raise it again by itself.

    mlx_lm.utils sets 2,048, and 4,096 for good. A server needs one file for each connection.
    """
    with patch.object(resource, "setrlimit"):
        yield
