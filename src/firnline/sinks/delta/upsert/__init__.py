"""Delta tables whose rows are changed by key."""
