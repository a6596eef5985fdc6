"""A process that takes ever more memory, up to a number of bytes, and holds it until it is ended.

python tests/pressure/hog.py BYTES BYTES_A_SECOND
"""

import sys
import time

STEP_SECONDS = 0.05


def main() -> None:
    most, rate = int(sys.argv[1]), int(sys.argv[2])
    held = list[bytes]()
    while (taken := sum(map(len, held))) < most:
        held.append(b"\1" * min(int(rate * STEP_SECONDS), most - taken))
        time.sleep(STEP_SECONDS)
    print("all", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
