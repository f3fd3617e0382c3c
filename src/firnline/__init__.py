"""Exactly-once, checkpointed data pipelines on Spark."""
