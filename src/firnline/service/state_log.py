"""The log of pipelines: a line when a state changes, when a run is started again, and when a person is needed."""

from __future__ import annotations

import logging
import threading

from firnline.service.access.disclosure import without_credentials
from firnline.service.supervise.policy import Wait
from firnline.service.supervise.supervisor import Seen

logger = logging.getLogger(__name__)


class StateLog:
    """Logs the changes of every pipeline, once each. May be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._words: dict[str, tuple[str, str | None, bool]] = {}

    def add(self, seen: Seen) -> None:
        """Log what changed since the pipeline was last seen."""
        name = seen.registered.name
        state = seen.glance.state if seen.glance is not None else "unknown"
        person = seen.explained
        waits = seen.decision if isinstance(seen.decision, Wait) else None
        words = (state, person, waits is not None)
        with self._lock:
            before = self._words.get(name)
            self._words[name] = words
        if words == before:
            return
        if person is not None and (before is None or before[1] != person):
            reason = without_credentials(person).splitlines()[0]
            logger.error("pipeline %s needs a person", name, extra={"state": state, "reason": reason})
        elif waits is not None and (before is None or not before[2]):
            logger.warning("pipeline %s is started again soon", name, extra={"state": state, "reason": waits.reason})
        elif before is None or before[0] != state:
            logger.info("pipeline %s is %s", name, state)
