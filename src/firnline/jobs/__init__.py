"""What an epoch runs on Spark."""
