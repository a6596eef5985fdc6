"""Grafana's dashboard and Prometheus' alerts of configs/, tried with a real Prometheus."""
