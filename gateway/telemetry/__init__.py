"""What happened, for people and machines: metrics, log lines, and the last requests with their decisions."""
