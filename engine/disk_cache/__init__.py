"""What goes from the arena to disk and comes back: the policy above `kvstore.disk`.

cache.py         what scheduler and loop talk to, with and without a disk
entries.py       what in memory an entry on disk is made of, and what an entry fills in
writer.py        what is written, and when
dirty_set.py     what of the tree is not on disk yet
loader.py        what is loaded: leases that are filled instead of being computed
load_budget.py   which loads may be under way at once, and how far each is read ahead
byte_pace.py     how many bytes a step has time for
tier.py          what all this asks of `kvstore.disk`

All of it belongs to the engine thread, but for what readers hand over through the inbox.
"""
