"""Watching the cache and the requests while the engine works.

snapshot.py    on the engine thread: what has changed in the tree since the last one; cheap
renderer.py    on a worker thread: keeps a replica of the tree, and makes pictures of it
watch.py       on the event loop: passes snapshots to the renderer, while a client watches
namespaces.py  the public ids of namespaces
latency.py     how long requests wait and tokens take

A picture (`engine.types.picture`) is what the server gets.
"""
