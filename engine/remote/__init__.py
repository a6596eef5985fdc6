"""An engine in a process of its own: the same `Engine`, over a pair of sockets."""
