"""Anthropic's Messages on the wire. What comes from a client has names that end in Param, as in
Anthropic's own libraries."""
