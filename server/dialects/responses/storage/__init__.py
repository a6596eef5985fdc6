"""Responses that outlive their request: stored ones, and those made in the background."""
