"""The APIs that are spoken here: how each asks, answers, streams and fails."""
