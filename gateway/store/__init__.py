"""State that outlives a request: what is in flight, and who holds which conversation."""
