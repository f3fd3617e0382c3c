"""Has the decoder ready before it is needed, and says so when that takes long."""

from __future__ import annotations

import threading
from collections.abc import Callable

COLD_SECONDS = 3.0  # loading the decoder takes less; compiling it takes much longer
COLD_MESSAGE = "preparing the decoder, once per installation (up to a minute)"


def warm_decoder(say: Callable[[str], None]) -> None:
    """Compile the decoder, or load it where it is compiled already."""
    timer = threading.Timer(COLD_SECONDS, say, [COLD_MESSAGE])
    timer.daemon = True
    timer.start()
    try:
        from firnline.ndjson import warm_up

        warm_up()
    finally:
        timer.cancel()
