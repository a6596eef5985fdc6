"""`python -m load_tests.streams.paced_engine SOCKET TOKENS_PER_SECOND WORD`: a process for a paced
engine.
"""

import sys
from functools import partial

from engine.build import start
from engine.remote.host import main
from load_tests.streams.paced import load

main(int(sys.argv[1]), partial(start, load=partial(load, float(sys.argv[2]), sys.argv[3])))
