"""The daemon on a disk that fails as a file says: `python -m tests.restart.faulty_daemon FILE`, and
then the flags of `serve`.

Each line of the file is a call and an errno, such as `write ENOSPC`.
"""

import errno
import sys
import threading
import time
from pathlib import Path
from unittest import mock

from kvstore.disk import store
from server.terminal.cli import app
from tests.disk_store_harness import FaultyFiles

POLL_SECONDS = 0.01


def obey(files: FaultyFiles, orders: Path) -> None:
    while True:
        told = (line.split() for line in orders.read_text().splitlines())
        files.failing = {call: getattr(errno, code) for call, code in told}
        time.sleep(POLL_SECONDS)


def main() -> None:
    orders, files = Path(sys.argv.pop(1)), FaultyFiles()
    threading.Thread(target=obey, args=[files, orders], daemon=True).start()
    with mock.patch.object(store, "OsFiles", return_value=files):
        app(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    main()
