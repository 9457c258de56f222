"""State that outlives a request: slots in flight, jobs, files, responses and cached prefixes."""
