"""What `rootstock doctor --measure` asks of the device, and what it is asked with.

The load tests and `make conformance` measure with the same code. Nothing here serves.
"""
