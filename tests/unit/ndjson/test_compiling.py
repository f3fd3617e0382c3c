"""Before the decoder is compiled, plain Python reads the same rows; one process compiles it, in the background."""

from __future__ import annotations

import io
import random
import subprocess
from typing import Any

import pyarrow as pa
import pytest

from firnline import jit
from firnline.ndjson import DecodeOptions, Decoder, KindCounter, compiling, open_blocks, warm_up
from firnline.ndjson import decode as decode_module

ODD_LINES = [
    b"",
    b"  \t\r",
    b"not json",
    b'{"a": "\xff"}',
    b"[1]",
    b'{"a": 1, "a": 2}',
    b'{"long": "' + b"x" * 300 + b'"}',
]


def generated(seed: int) -> bytes:
    """Records of many kinds, with blank, bad and long lines among them; the last may lack its line feed."""
    rng = random.Random(seed)
    values: list[Any] = [
        "1", "-7", "2.5", "1e300", "9007199254740993", "null", "true", '"text"', '"\\u00e9\\n"',
        '"2024-05-06T07:08:09Z"',
        "[]", "{}", "[1, 2.5]", '{"x": 1, "y": {"z": "deep"}}', '[{"k": "v"}]',
    ]  # fmt: skip
    lines = []
    for _ in range(300):
        names = rng.sample(["a", "b", "c", "d", "long"], rng.randint(0, 4))
        record = ", ".join(f'"{name}": {rng.choice(values)}' for name in names)
        lines.append(rng.choice(ODD_LINES) if rng.random() < 0.1 else f" {{{record}}}".encode())
    return b"\n".join(lines) + (b"\n" if seed % 2 else b"")


def read(data: bytes, schema: pa.Schema, options: DecodeOptions) -> list[Any]:
    """All that a reader of this data learns."""
    decoder, counter, found = Decoder(schema, schema.names, options), KindCounter(schema, schema.names, ()), []
    blocks = open_blocks(io.BytesIO(data), path="a", compression=None, block_bytes=4096, max_record_bytes=256)
    for block in blocks:
        decoded = decoder.decode(block)
        counter.add(decoded.batch)
        numbers = (block.first_record, block.first_line, block.records, block.lines, block.end_offset, block.oversized)
        found.append((numbers, decoded.batch, decoded.record_numbers.to_pylist(), decoded.bad))
    return [*found, decoder.schema, blocks.finished, blocks.records_read, blocks.lines_read, blocks.end_offset]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("evolution", ["add", "rescue"])
def test_plain_python_reads_what_the_compiled_decoder_reads(
    seed: int, evolution: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.string())]) if seed % 3 else pa.schema([])
    options = DecodeOptions(evolution=evolution)
    with jit.compiling():
        compiled = read(generated(seed), schema, options)
    begun: list[bool] = []
    never = lambda _: False  # noqa: E731
    for module in ("ndjson.reader", "ndjson.infer"):
        monkeypatch.setattr(f"firnline.{module}.is_compiled", never)
    monkeypatch.setattr(decode_module, "is_ready", lambda: False)
    monkeypatch.setattr(decode_module, "compile_beside", lambda: begun.append(True))
    assert read(generated(seed), schema, options) == compiled
    assert begun


def test_a_decoder_that_another_process_compiles_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **_: started.append(args))
    compiling.compile_beside.cache_clear()
    with compiling._lock() as free:
        assert free
        compiling.compile_beside()
        assert started == []
    compiling.compile_beside.cache_clear()
    compiling.compile_beside()
    compiling.compile_beside()
    assert len(started) == 1
    compiling.compile_beside.cache_clear()


def test_the_decoder_is_ready_once_it_is_compiled() -> None:
    warm_up()
    assert compiling.is_ready()
