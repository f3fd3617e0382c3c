"""PostgreSQL tables: rows and checkpoint become true in one transaction."""
