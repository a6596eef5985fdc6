"""The daemon with a disk cache dies, its disk fails, and nobody gets a wrong token.

    python -m tests.restart kills       100 daemons killed under load, at random moments
    python -m tests.restart faults      everything that can happen to the directory
    python -m tests.restart families    a stop and a kill for each kind of model

asking.py       what is asked, and what is heard of an answer as it comes
questions.py    a load of questions, with the answers of a daemon that has no disk cache
living.py       daemons as processes of their own, and the disk that their directory takes
kills.py, faults.py, families.py    the runs; test_restart.py has a short form of each
test_hangs.py   a signal ends a daemon in which something hangs
"""
