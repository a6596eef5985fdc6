"""`python -m measuring DESCRIPTOR` is the process that measures a section of `doctor --measure`."""

import sys

from measuring.process import main

main(sys.argv[1])
