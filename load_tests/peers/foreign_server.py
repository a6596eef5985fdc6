"""A server of another environment on the BLAS that Rootstock loads: arguments are PREFIX, MODULE,
then the server's.

PREFIX is where Rootstock's own environment lies, which may have a BLAS. MODULE's `main` is the
server.
"""

import importlib
import sys
from pathlib import Path

from engine.mlx_backend.blas import load_blas


def main() -> None:
    """Load the BLAS, then become the server."""
    load_blas([Path(sys.argv.pop(1)) / "lib"])
    importlib.import_module(sys.argv.pop(1)).main()


if __name__ == "__main__":
    main()
