"""Delta tables: tasks stage files, delta-rs commits them together with the checkpoint."""
