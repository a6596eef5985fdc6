"""What goes from the arena to disk and comes back: the policy above `kvstore.tier`.

cache.py        what scheduler and loop talk to, and the value for no disk cache
names.py        what the blocks in the tree are called on disk
entries.py      what memory has that an entry is made of, and what an entry gives back
archive.py      what is written, and when
unwritten.py    what of the tree the tier has not
recalls.py      what is read: leases that are filled in place of being computed
load_budget.py  which of them may be under way, and how far they are read ahead
byte_pace.py    how many bytes a step has time for

All of it belongs to the engine thread, but for what readers hand over through the inbox.
"""
