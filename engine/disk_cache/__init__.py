"""What goes from the arena to disk and comes back: the policy above `kvstore.disk`.

cache.py         what scheduler and loop talk to, and how it is opened
entries.py       what in memory an entry on disk is made of, and what an entry fills in
writer.py        what is written, and when
loader.py        what is loaded: leases that are filled instead of being computed
transfers.py     how many bytes a step has time for, and which loads may be under way at once

All of it belongs to the engine thread, but for what readers hand over through the inbox.
"""
