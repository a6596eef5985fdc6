"""The Prometheus metrics of `/metrics`. Imports access and http for their counters."""
