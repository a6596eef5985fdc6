"""vllm-mlx on the BLAS that Rootstock loads: arguments are PREFIX, then vllm-mlx's.

PREFIX is where Rootstock's own environment lies, which may have a BLAS. vllm-mlx has another one.
"""

import sys
from pathlib import Path

from engine.mlx_backend.blas import load_blas


def main() -> None:
    """Load the BLAS, then become the server."""
    load_blas([Path(sys.argv.pop(1)) / "lib"])
    from vllm_mlx.cli import main as serve  # noqa: PLC0415 - the BLAS must come first

    serve()


if __name__ == "__main__":
    main()
