"""The Delta source: follows the versions of a table, appended rows or change rows."""
