"""Responses written: an answer's parts as output items, and as events."""
