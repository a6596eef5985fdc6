"""The Prometheus metrics of `/metrics`. Imports access and transport for their counters."""
