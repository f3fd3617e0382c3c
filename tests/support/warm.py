"""Imported once by the server that children are forked from: everything slow to load, nothing that starts threads."""

from __future__ import annotations

import deltalake  # noqa: F401
import obstore.store  # noqa: F401
import pyarrow.parquet  # noqa: F401

import firnline.committer.service
import firnline.run.open_pipeline
import firnline.run.runner
import firnline.testing.local  # noqa: F401
from firnline.ndjson import warm_up

warm_up()
