"""`make browser`: the tests of the page, which fail where there is no Chromium, and how soon the
picture follows the cache."""

import subprocess
import sys

from tests.browser.chromium import MISSING, executable
from tests.browser.promptness import report

MOST_SECONDS = 1.5


def main() -> int | str:
    if executable() is None:
        return MISSING
    tests = [sys.executable, "-m", "pytest", "tests/browser", *sys.argv[1:]]
    if status := subprocess.run(tests, check=False).returncode:
        return status
    seconds = report()
    return 0 if seconds <= MOST_SECONDS else f"the picture is more than {MOST_SECONDS} s behind"


if __name__ == "__main__":
    sys.exit(main())
