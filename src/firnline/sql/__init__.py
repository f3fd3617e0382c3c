"""The queries of SQL operators, without a JVM: checks a query, and binds its inputs and time before Spark runs it.

A query must return the same rows whenever an epoch is repeated, and must read its inputs and nothing else.
sqlglot is imported with the first query, not with this package.
"""

from firnline.sql.check import Finding, check_query
from firnline.sql.query import bind_epoch_time, bind_tables

__all__ = ["Finding", "bind_epoch_time", "bind_tables", "check_query"]
