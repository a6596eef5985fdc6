"""`python -m tests.unit.rank_stub PAIR CONNECTION BEHAVIOUR`: stands for the process of a rank."""

import os
import signal
import socket
import sys

from engine.process.joining import LOADED

if __name__ == "__main__":
    pair = socket.socket(fileno=int(sys.argv[1]))
    connection = socket.socket(fileno=int(sys.argv[2]))
    connection.sendall(f"{os.getpid()} ".encode())
    behaviour = sys.argv[3]
    if behaviour != "fails":
        pair.sendall(LOADED)
    if behaviour == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    while behaviour != "fails" and connection.recv(1 << 16):
        pass
    sys.exit(7)
