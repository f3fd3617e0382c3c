"""Garbage collection, compaction and vacuum of tables, state and ledger."""
