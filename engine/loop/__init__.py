"""The engine's thread: its loop, the steps on their way, and the ways in and out."""
