"""`python -m engine.remote SOCKET`: a file descriptor that it inherits."""

import sys

from engine.build import start
from engine.remote.host import main

main(int(sys.argv[1]), start)
