"""A process in place of the one that compares attentions. The digest in its task says what it does.
It imports no MLX, so that it starts at once.
"""

import json
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

CELL = {"rows": 1, "keys": 1024, "milliseconds": {"gather": 2.0, "cascade": 1.0}}


def main(descriptor: str) -> None:
    with Connection(int(descriptor)) as connection:
        task = json.loads(connection.recv_bytes())
        match task["key"]["source"]:
            case "exits":
                sys.exit(3)
            case "crashes":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "has no memory":
                lacking = {"kind": "a kind", "state": "postponed", "why": "out of memory"}
                connection.send_bytes(json.dumps(lacking).encode())
            case "hangs":
                time.sleep(600)
            case "babbles":
                connection.send_bytes(b"{")
            case _:
                found = {"kind": "a kind", "state": "passed", "cells": [CELL]}
                connection.send_bytes(json.dumps(found).encode())


if __name__ == "__main__":
    main(sys.argv[1])
