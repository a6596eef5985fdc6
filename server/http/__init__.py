"""Connections and HTTP: their limits, request bodies, unsent responses, server-sent events.

Imports record.py, workers.py and errors.py.
"""
