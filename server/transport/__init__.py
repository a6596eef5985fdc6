"""Bytes in and out: connections and their limits, bodies on their way in, answers not yet sent."""
