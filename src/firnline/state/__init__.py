"""Keyed state: key groups, immutable runs of changed keys, and the checkpoints that name them."""
