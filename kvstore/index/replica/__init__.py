"""A copy of the tree's shape on another thread, so that pictures of it cost the engine nothing.

journal  engine thread   an observer that records changes, and at first copies the tree bit by bit
replica  any one thread  applies the changes in their order, and knows what each subtree weighs
"""
