"""The process of an engine in which something hangs: `python -m tests.restart.hung_engine SOCKET
WHAT`.
"""

import sys
from unittest import mock

from engine.build import start
from engine.remote.host import main
from tests.restart.hung_daemon import HANGING, hang

if __name__ == "__main__":
    with mock.patch(HANGING[sys.argv[2]], hang):
        main(int(sys.argv[1]), start)
