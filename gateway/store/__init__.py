"""State that outlives a request or is shared by processes, such as slots, jobs, files and responses."""
