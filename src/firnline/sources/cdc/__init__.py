"""Change capture: what the sources that read a database's own log have in common."""
