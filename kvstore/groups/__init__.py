"""What layers keep besides blocks of every token: trailing windows and recurrent states.

A group has storage of its own. Leases use its slots, and slots are attached to blocks. A slot that
no lease uses is freed with its blocks, or evicted, least recently used first, when one is needed.
"""
