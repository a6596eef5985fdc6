"""A worker that does to itself what the beginning of a file says: as an image might that a decoder
reads wrongly.
"""

import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from engine.images import wire, worker
from engine.images.decode import decode
from engine.images.processors import Processor
from engine.images.wire import PrepareJob, PrepareReport

sound = worker.prepare


def _spin() -> NoReturn:
    while True:
        pass


def prepare(processor: Processor, job: PrepareJob) -> PrepareReport:
    """Do what the file says, or prepare it."""
    fault = Path(job.source).read_bytes()[:20].split()
    (Path(job.folder) / wire.unfinished_file(os.getpid())).write_bytes(b"half")
    match fault:
        case [b"exit", code]:
            os._exit(int(code))
        case [b"signal", number]:
            os.kill(os.getpid(), int(number))
        case [b"spin"]:
            _spin()
        case [name, *_] if name.startswith(b"sleep"):
            time.sleep(1e6)
        case [b"memory"]:
            vars(worker)["decode"] = lambda encoded: bytes(wire.MEMORY_BYTES)
            report = sound(processor, job)
            vars(worker)["decode"] = decode
            return report
        case [b"nonsense"]:
            os.write(int(sys.argv[1]), b"\4\0\0\0nope")
            time.sleep(1e6)
        case [b"grid"]:
            return PrepareReport(bytes(32), (10**9, 10**9))
        case [b"digest"]:
            return PrepareReport(bytes(3), (1, 4, 4))
    return sound(processor, job)


if __name__ == "__main__":
    vars(worker).update(PROCESSOR_SECONDS=1, prepare=prepare)
    worker.main()
