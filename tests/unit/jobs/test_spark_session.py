from __future__ import annotations

import pytest

from firnline.errors import ConfigError
from firnline.jobs.spark import SparkEngine


def test_spark_connect_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_REMOTE", "sc://127.0.0.1:1")
    with pytest.raises(ConfigError, match="Spark Connect is not supported"):
        SparkEngine("p", {}).run("tag", [{"kind": "read"}])
