"""Watching the cache while it works.

glimpse  engine thread    what has changed in the tree since the last one, and who runs: cheap
painter  a worker thread  keeps a replica of the tree, and makes pictures of it
watch    event loop       goes between the two, for as long as somebody watches
picture  values           what the server is shown
"""
