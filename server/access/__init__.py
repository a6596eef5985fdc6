"""Who may do what: keys, how much each may ask, and from which hosts and web pages."""
