"""Two-stage Delta tables: the committer."""
