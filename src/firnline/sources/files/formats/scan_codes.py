"""Numbers that the compiled scans and their readers agree on.

They are part of the machine code, whose cache (`firnline.jit`) therefore depends on this module.
"""

from __future__ import annotations

# Why a scan stopped: the data ends, perhaps inside a record; before a record beyond the limit; before a record that is
# too long; the target is full; and reasons why the file is broken.
MORE, LIMIT, LONG, FULL, CUT, TRAILING = range(6)

# Fields of the control array, which a scan reads when it starts and updates when it returns. The last three belong to
# the passing over a record that is too long.
LINE, MODE, CUT_LINE, SKIPPING, SKIP_DEPTH, SKIP_QUOTED = range(6)
CONTROL_SIZE = 6

# Columns of the table of records: line, first byte, byte after the last one, and why it is refused (0: it is not).
ROW_LINE, ROW_START, ROW_END, ROW_REASON = range(4)
