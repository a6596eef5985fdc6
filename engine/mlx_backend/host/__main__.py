"""`python -m engine.mlx_backend.host DESCRIPTOR`: says how much memory MLX finds free, in bytes."""

import socket
import sys

from engine.mlx_backend.host.machine import examine

if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        connection.sendall(str(examine().left_bytes).encode())
