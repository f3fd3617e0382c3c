"""Imported once by the server that children are forked from: everything slow to load, nothing that starts threads.

A child imports the module of the work that it is handed; what such modules import, pytest included, is loaded here.
"""

from __future__ import annotations

import deltalake  # noqa: F401
import obstore.store  # noqa: F401
import pyarrow.parquet  # noqa: F401
import pytest  # noqa: F401

import firnline.committer.service
import firnline.history.edits.ledger_repair
import firnline.history.edits.operator_state
import firnline.history.edits.restore
import firnline.history.edits.rollback
import firnline.history.savepoints.catalog
import firnline.history.savepoints.create
import firnline.history.status
import firnline.maintenance.compact
import firnline.maintenance.gc
import firnline.maintenance.state
import firnline.run.open_pipeline
import firnline.run.runner
import firnline.testing.local  # noqa: F401
from firnline.ndjson import warm_up

warm_up()
