"""Kafka topics: one transaction per epoch and lane holds the rows and the checkpoint."""
