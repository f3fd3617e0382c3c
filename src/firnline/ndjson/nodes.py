"""The numbers that the kernel and the Python side agree on: kinds of nodes, columns of the tables, control fields."""

from __future__ import annotations

# Kinds of nodes. Containers come first, then those with offsets, then those with 64-bit words.
STRUCT, LIST, MAP, STRING, ANY_STRING, RAW, BINARY, BOOL, INT64, INT32, FLOAT64, FLOAT32, DECIMAL, TIMESTAMP, DATE = (
    range(15)
)

# Columns of the node table.
(KIND, PARENT, FIRST, COUNT, REQUIRED, REQUIRES, KEY, KEY_SIZE, TABLE, TABLE_MASK, PRECISION, SCALE,
 VALID, WORDS, OFFSETS, TEXT, CAPACITY, TEXT_CAPACITY, LENGTH, TEXT_LENGTH) = range(20)  # fmt: skip
NODE_COLUMNS = 20

# Fields of the control array: what a scan starts from and leaves behind.
POSITION, ROW, RECORD, LINE, ODD_COUNT, FULL_NODE, FULL_TEXT, RESCUE_NODE, RESCUE_ALL = range(9)
CONTROL_SIZE = 9
MAX_RESCUED = 16  # unknown fields of one record that the kernel rescues itself

# Columns of the table of odd records: first and last byte of the line, rows before, record and line in the block.
ODD_START, ODD_END, ODD_ROW, ODD_RECORD, ODD_LINE = range(5)
