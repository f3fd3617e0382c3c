"""The Kafka source: topics, read by offset ranges."""
