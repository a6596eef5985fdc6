"""Child processes of the daemon and of its engines, and the sockets to them."""
