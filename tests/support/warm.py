"""Imported once by the server that children are forked from: everything slow to load, nothing that starts threads.

A child imports the module of the work that it is handed, and nothing else: all modules that such work uses are loaded
here, those that Firnline imports on demand included. What is loaded lives until the end: no collection of a child looks
at it. A collection would copy each of its pages, and a small pipeline would take three times the processor time.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import deltalake  # noqa: F401
import obstore.store  # noqa: F401
import pyarrow.parquet  # noqa: F401
import pytest  # noqa: F401

import firnline
import tests.support
from firnline.avro.decode import warm_up as warm_up_avro
from firnline.ndjson import decode, write


def modules_of(package: ModuleType) -> Iterator[str]:
    """The names of all modules below a package that work in a child may import."""
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if not module.name.endswith(".__main__"):  # would begin to work
            yield module.name
            if module.ispkg:
                yield from modules_of(importlib.import_module(module.name))


for name in (*modules_of(firnline), *modules_of(tests.support)):
    with contextlib.suppress(ImportError):  # an extra that is not installed
        importlib.import_module(name)
decode.warm_up()
write.warm_up()
warm_up_avro()
gc.collect()
gc.freeze()
