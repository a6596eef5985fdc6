"""A rank that decodes by compiled steps, as rank 0 of `tests.golden.ranking` does."""

import math
import sys

from engine.mlx_backend.blas import load_blas

load_blas()  # before MLX

from engine.mlx_backend.decode import choice  # noqa: E402
from engine.mlx_backend.rank import main  # noqa: E402

choice.WINS = math.inf

main(int(sys.argv[1]))
