"""Checkpoints: the model, its durable form, and the ledger."""
