"""`python -m load_tests.streams.paced_engine SOCKET TOKENS_PER_SECOND WORD`: a process for a paced
engine.
"""

import sys

from engine.core.thread import Build
from engine.remote.host import Report, main
from engine.values.settings import EngineConfig
from load_tests.streams.paced import build


def _builder(config: EngineConfig, report: Report) -> Build:
    rate, word = float(sys.argv[2]), sys.argv[3]
    return lambda inbox, deliver: build(config, rate, word, inbox, deliver)


main(int(sys.argv[1]), _builder)
