"""Connections and HTTP: their limits, request bodies, unsent responses, server-sent events."""
