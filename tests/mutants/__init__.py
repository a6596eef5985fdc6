"""Faults planted in the source, to see whether a test fails for each: `python -m tests.mutants`."""
