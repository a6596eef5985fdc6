"""What layers keep besides blocks of every token: trailing windows and recurrent states.

A group has storage of its own. Leases hold slots of it, blocks carry slots of it; a slot goes when
nobody holds it and its blocks go, or when another needs the room more (least recently used first).
"""
