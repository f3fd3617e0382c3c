"""Lists of words in a spec: a wrong word is named with those that may stand there."""

from __future__ import annotations

from pathlib import Path

import pytest

from firnline.errors import SpecError
from firnline.spec.build import load_options

SPEC = """\
name: shop
sources: {db: {type: postgres, dsn: "${env:DSN}", tables: [orders], include: [position, befor]}}
sinks: [{table: out, input: db.orders}]
"""


def test_a_wrong_word_of_a_list(tmp_path: Path) -> None:
    (tmp_path / "firnline.yml").write_text(SPEC)
    with pytest.raises(SpecError) as caught:
        load_options(tmp_path / "firnline.yml", environ={"DSN": "postgresql://127.0.0.1/db"})
    assert "sources.db.include[1]: must be one of committed_at, position, transaction, before" in str(caught.value)
    assert 'did you mean "before"?' in str(caught.value)
