"""What the tests of a session have covered: states that were searched, processes that were killed.

Whoever searches or kills adds to `covered`. `tests/conftest.py` notes what each test has added, `scripts/run_tests.py`
adds it up, and `make proof` writes it into `docs/how-it-is-tested.md`.
"""

from __future__ import annotations

from collections import Counter

covered: Counter[str] = Counter()
