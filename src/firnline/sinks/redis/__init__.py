"""Redis: rows in a stream, or one hash or string per key; each script writes rows and moves the head."""
