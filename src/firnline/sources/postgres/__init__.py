"""Change capture from PostgreSQL: the tables of a publication, by logical replication."""
