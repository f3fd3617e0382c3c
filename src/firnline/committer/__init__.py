"""The committer of two-stage tables: validates staged units and commits them in order."""
