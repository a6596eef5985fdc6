"""Policy of the disk cache above `kvstore.disk`: which blocks are written and loaded, and when.

cache.py         the interface for scheduler and loop, and opening
entries.py       maps blocks in memory to entries on disk
writer.py        decides which blocks are written, and when
loader.py        loads: leases that are filled instead of computed
transfers.py     limits on the bytes of a step and on concurrent loads

All of it runs on the engine thread. Readers deliver through the inbox.
"""
