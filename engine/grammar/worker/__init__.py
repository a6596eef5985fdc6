"""The program of a grammar process: the only place where llguidance runs.

It parses what clients send, and may crash, hang or take any amount of memory. Imports nothing of
the daemon, and no MLX.
"""
