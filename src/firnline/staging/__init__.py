"""Two-stage tables: writers stage units, a committer makes them true; clean-up and compaction."""
