"""What parts of the engine cost by themselves: `python -m load_tests.bench.NAME`."""

from engine.mlx_backend.blas import load_blas

load_blas()  # MLX takes the BLAS that is there when it is imported
