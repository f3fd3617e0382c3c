"""A pipeline's past: status, checkpoints, differences and state, read-only."""
