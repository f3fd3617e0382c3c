"""Delta tables whose rows change by key."""
