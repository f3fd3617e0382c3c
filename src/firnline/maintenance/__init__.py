"""gc, compaction and vacuum of tables and state."""
