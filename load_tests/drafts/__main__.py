"""What drafts bring and cost.

    python -m load_tests.drafts --task copy --task unique --rounds 7

Each load is asked with drafts, without, and without again, in one daemon and in turns, under a salt
of its own each time: nothing is found that another turn has left. Ratios are of output tokens a
second within a round; that of the two turns without drafts is the noise. Loads that are not `mixed`
have their prompts in the cache, so that answers alone are timed. Answers must be the same with
drafts and without, or the command fails.
"""

import typer

from load_tests.drafts.command import drafts

if __name__ == "__main__":
    typer.run(drafts)
