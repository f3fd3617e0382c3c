"""SQL operators without a JVM: checks a query, and binds its inputs before Spark runs it.

A query must give the same rows whenever an epoch is repeated, and must read its inputs and nothing else.
sqlglot is loaded with the first query, never by an import of this package.
"""

from firnline.sql.binding import bind_epoch_time, bind_tables
from firnline.sql.checking import check_query
from firnline.sql.reading import Finding

__all__ = ["Finding", "bind_epoch_time", "bind_tables", "check_query"]
