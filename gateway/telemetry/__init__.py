"""Observability: metrics, traces, log lines, and the most recent requests with their decisions."""
