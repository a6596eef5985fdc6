"""Who is being served, who was, and how things went in the last minutes. In memory, bounded.

tracker.py follows each request from when the engine is asked to its end, live.py joins that with
what the engine knows, series.py keeps the figures of the last quarter of an hour. No text of
prompts or answers is in any of it.
"""
