"""Newline-delimited JSON: reads files in blocks of lines (`reader`) and decodes them, compiled, to Arrow (`decode`)."""

from firnline.ndjson.decode import (
    BadRecord,
    Decoded,
    DecodeOptions,
    Decoder,
    MismatchError,
    UnexpectedFieldError,
    find_fitting,
    warm_up,
)
from firnline.ndjson.infer import Choice, KindCounter, add_counts, apply_kinds, choose, json_paths, kinds_of
from firnline.ndjson.reader import Block, BlockReader, Origins, Oversized, Refused, open_blocks
from firnline.ndjson.streams import BrokenFileError, ByteStream, CountingStream, compression_of, open_pieces
from firnline.ndjson.tree import shown_path

__all__ = [
    "BadRecord",
    "Block",
    "BlockReader",
    "BrokenFileError",
    "ByteStream",
    "Choice",
    "CountingStream",
    "DecodeOptions",
    "Decoded",
    "Decoder",
    "KindCounter",
    "MismatchError",
    "Origins",
    "Oversized",
    "Refused",
    "UnexpectedFieldError",
    "add_counts",
    "apply_kinds",
    "choose",
    "compression_of",
    "find_fitting",
    "json_paths",
    "kinds_of",
    "open_blocks",
    "open_pieces",
    "shown_path",
    "warm_up",
]
