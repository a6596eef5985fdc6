"""Turns sampled tokens into text, and decides when a sequence ends."""
