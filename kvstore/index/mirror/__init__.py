"""A second tree of the same shape, on another thread: what is made of it costs the engine nothing.

journal  engine thread   notes what an observer is told, and copies the tree bit by bit at first
mirror   any one thread  takes the notes in, in their order, and knows what each subtree weighs
"""
