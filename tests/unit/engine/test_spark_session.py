from __future__ import annotations

import pytest

from firnline.engine.spark import SparkEngine
from firnline.errors import ConfigError


def test_spark_connect_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_REMOTE", "sc://127.0.0.1:1")
    with pytest.raises(ConfigError, match="Spark Connect is not supported"):
        SparkEngine("p", {}).run("tag", [{"kind": "read"}])
