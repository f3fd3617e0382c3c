"""The jobs of an epoch on Spark: the engine, what the driver plans, and what tasks run on workers."""
