"""History edits, epochs that read nothing: rollback, fresh start, restore, rescale, state import, ledger repair."""
