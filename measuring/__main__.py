"""The process that measures a section of `doctor --measure`: `python -m measuring DESCRIPTOR`."""

import sys

from measuring.doctor import main

main(sys.argv[1])
