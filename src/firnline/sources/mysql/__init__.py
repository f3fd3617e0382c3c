"""The log of MySQL and MariaDB: the replication stream for the driver, and the decoder of its events for workers."""
