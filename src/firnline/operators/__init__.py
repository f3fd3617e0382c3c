"""Stateful operators: the contract in `base`, and aggregate, deduplicate and correlate."""
