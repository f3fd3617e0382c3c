"""Reading lines in blocks: nothing lost at a cut, nothing taken from a damaged file as complete."""

from __future__ import annotations

import gzip
import io
import pickle
import tracemalloc

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from firnline.ndjson import Block, BrokenFileError, compression_of, open_blocks, streams
from firnline.ndjson.streams import Compression


def _read(data: bytes, compression: Compression | None = None, **options: int) -> list[Block]:
    return list(open_blocks(io.BytesIO(data), path="f", compression=compression, **options))


def _records(blocks: list[Block]) -> list[tuple[int, int, bytes]]:
    """Return (record, line, text) of every record, from the blocks alone."""
    found = []
    for block in blocks:
        record, line = block.first_record, block.first_line
        lines = bytes(block.data).split(b"\n")
        for text in lines:
            if text.strip(b" \t\r"):
                found.append((record, line, text.strip(b" \t\r")))
                record += 1
            line += 1
        assert record - block.first_record + len(block.oversized) == block.records
    return found


def _expected(data: bytes) -> list[tuple[int, int, bytes]]:
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
    lines = [(number, text.strip(b" \t\r")) for number, text in enumerate(data.split(b"\n"), 1)]
    return [(record, line, text) for record, (line, text) in enumerate((n, t) for n, t in lines if t)]


_line = st.sampled_from([b'{"a":1}', b"", b"  ", b"\r", b'{"a":"' + b"x" * 40 + b'"}\r', b"bad", b"\t{} "])
_files = st.builds(
    lambda bom, lines, end: bom + b"\n".join(lines) + end,
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.lists(_line, max_size=12),
    st.sampled_from([b"", b"\n", b"\n\n \n"]),
)


@pytest.mark.parametrize(
    ("path", "expected"),
    [("a.ndjson", None), ("a.json.gz", "gz"), ("a.JSON.GZ", "gz"), ("a.zst", "zst"), ("a.gz/b.json", None)],
)
def test_the_suffix_tells_the_compression(path: str, expected: str | None) -> None:
    assert compression_of(path) == expected


@given(_files, st.integers(1, 60), st.sampled_from([None, "gz", "zst"]))
@settings(deadline=None, derandomize=True, max_examples=200)
@example(b"", 4, "gz")
def test_blocks_hold_every_record_in_order(data: bytes, size: int, compression: Compression | None) -> None:
    packed = {None: data, "gz": gzip.compress(data), "zst": zstandard.compress(data)}[compression]
    blocks = _read(packed, compression, block_bytes=size)
    assert _records(blocks) == _expected(data)
    assert [block.last for block in blocks] == [False] * (len(blocks) - 1) + [True] * bool(blocks)
    if blocks:
        assert blocks[-1].end_offset == len(data)
        assert blocks[-1].consumed_bytes == len(packed)


@given(_files, st.integers(1, 60), st.lists(st.integers(1, 4), min_size=12, max_size=12))
@settings(deadline=None, derandomize=True, max_examples=200)
def test_reading_over_several_epochs_gives_the_same_records(data: bytes, size: int, cuts: list[int]) -> None:
    packed = gzip.compress(data)
    expected = _expected(data)
    by_skip: list[tuple[int, int, bytes]] = []
    by_seek: list[tuple[int, int, bytes]] = []
    done = offset = line = 0
    for cut in cuts:
        skipping = open_blocks(
            io.BytesIO(packed), path="f", compression="gz", skip_records=done, max_records=cut, block_bytes=size
        )
        assert skipping.finished == (done == len(expected)), "finished is known before the first block"
        by_skip += _records(list(skipping))
        seeking = open_blocks(
            io.BytesIO(data[offset:]), path="f", compression=None, start_offset=offset, start_record=done,
            start_line=line, max_records=cut, block_bytes=size,
        )  # fmt: skip
        blocks = list(seeking)
        by_seek += _records(blocks)
        assert seeking.records_read == skipping.records_read == min(done + cut, len(expected))
        assert seeking.finished == skipping.finished == (seeking.records_read == len(expected))
        if blocks:
            done, offset, line = blocks[-1].end_record, blocks[-1].end_offset, blocks[-1].end_line
        if seeking.finished:
            break
    assert by_skip == expected[: len(by_skip)]
    assert by_seek == by_skip


def test_a_file_with_fewer_records_than_were_read_is_broken() -> None:
    assert open_blocks(io.BytesIO(b"1\n2\n"), path="f", compression=None, skip_records=2).finished
    with pytest.raises(BrokenFileError, match="has 2 records"):
        _read(b"1\n2\n", skip_records=3)


def test_members_and_frames_are_read_to_the_last() -> None:
    parts = [b"1\n2", b"\n3\n", b"", b"4"]
    packed = b"".join(gzip.compress(part) for part in parts)
    assert [text for _, _, text in _records(_read(packed, "gz"))] == [b"1", b"2", b"3", b"4"]
    packed = b"".join(zstandard.compress(part) for part in parts)
    assert [text for _, _, text in _records(_read(packed, "zst"))] == [b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("compression", ["gz", "zst"])
def test_an_empty_file_is_a_file_without_records(compression: Compression) -> None:
    reader = open_blocks(io.BytesIO(b""), path="f", compression=compression)
    assert reader.finished
    assert list(reader) == []


_LINES = b"".join(b'{"id":%d,"x":"%d"}\n' % (n, n * 7919) for n in range(400))


@pytest.mark.parametrize("compression", ["gz", "zst"])
def test_a_file_cut_at_any_length_is_broken(compression: Compression) -> None:
    if compression == "gz":
        whole = gzip.compress(_LINES[:2000]) + gzip.compress(_LINES[2000:])
        fine = {0, len(gzip.compress(_LINES[:2000]))}
    else:
        packer = zstandard.ZstdCompressor(write_checksum=True)
        whole = packer.compress(_LINES[:2000]) + packer.compress(_LINES[2000:])
        fine = {0, len(packer.compress(_LINES[:2000]))}
    for length in range(len(whole)):
        if length in fine:
            continue
        with pytest.raises(BrokenFileError) as caught:
            _read(whole[:length], compression, block_bytes=512)
        assert caught.value.path == "f"
    assert len(_records(_read(whole, compression))) == 400


@pytest.mark.parametrize("compression", ["gz", "zst"])
def test_damage_and_trailing_bytes_are_noticed(compression: Compression) -> None:
    whole = gzip.compress(_LINES, mtime=0)
    if compression == "zst":
        whole = zstandard.ZstdCompressor(write_checksum=True).compress(_LINES)
    for extra in (b"x", b"\0", b"garbage" * 10, whole[:5]):
        with pytest.raises(BrokenFileError):
            _read(whole + extra, compression)
    # From the body on: some bits of a gzip header (name of the system, time) carry nothing.
    for at in range(10, len(whole), 7):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        with pytest.raises(BrokenFileError):
            _read(bytes(damaged), compression)


def test_records_before_the_damage_are_given_out_but_never_the_last_block() -> None:
    whole = gzip.compress(_LINES)
    reader = open_blocks(io.BytesIO(whole[:-1]), path="f", compression="gz", block_bytes=1000)
    seen: list[Block] = []
    with pytest.raises(BrokenFileError):
        seen.extend(reader)
    assert 0 < sum(block.records for block in seen) < 400
    assert not any(block.last for block in seen)


def test_a_record_that_is_too_long_keeps_its_number_line_head_and_size() -> None:
    long = b'{"x":"' + b"y" * 100_000 + b'"}'
    data = b"\n".join([b"1", long, b"", b"2", long])
    for size in (64, 1000, 1 << 20):
        blocks = _read(data, block_bytes=size, max_record_bytes=1000)
        big = [item for block in blocks for item in block.oversized]
        assert [(item.record, item.line, item.size_bytes) for item in big] == [(1, 2, len(long)), (3, 5, len(long))]
        assert all(long.startswith(item.head) and 1000 < len(item.head) <= 65536 for item in big if size > 64)
        assert [(r, n, t) for r, n, t in _records(blocks)] == [(0, 1, b"1"), (2, 4, b"2")]
        assert blocks[-1].last
        assert blocks[-1].end_offset == len(data)


def test_one_endless_line_needs_little_memory() -> None:
    packed = gzip.compress(b'{"x":"' + b"y" * 200_000_000 + b'"}\n{}\n', 1)
    tracemalloc.start()
    blocks = _read(packed, "gz", block_bytes=1 << 20, max_record_bytes=1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [block.records for block in blocks] == [1, 1]
    assert blocks[0].oversized[0].size_bytes == 200_000_008
    assert peak < 16 << 20


def test_many_blanks_need_little_memory() -> None:
    packed = gzip.compress(b" " * 50_000_000 + b"{}\n" + b" " * 50_000_000, 1)
    tracemalloc.start()
    blocks = _read(packed, "gz", block_bytes=1 << 18)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(block.records for block in blocks) == 1
    assert peak < 8 << 20


def test_tiny_records_come_in_blocks_of_bounded_count() -> None:
    blocks = _read(b"{}\n" * 100_000)
    assert [block.records for block in blocks] == [65_536, 34_464]


@pytest.mark.parametrize("compression", [None, "gz", "zst"])
def test_a_failing_stream_is_no_broken_file(compression: Compression | None) -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() > 0:
                raise ConnectionResetError("gone")
            return super().read(100)

    whole = {"gz": gzip.compress(_LINES), "zst": zstandard.compress(_LINES), None: _LINES}[compression]
    with pytest.raises(ConnectionResetError):
        list(open_blocks(Failing(whole), path="f", compression=compression))


@pytest.mark.parametrize("library", ["isal.isal_zlib", "zlib_ng.zlib_ng", "zlib"])
def test_every_gzip_library_reads_and_notices_alike(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_zlib", pytest.importorskip(library))
    whole = gzip.compress(_LINES) + gzip.compress(b"{}")
    assert len(_records(_read(whole, "gz", block_bytes=700))) == 401
    for broken in (
        whole[:-1],
        whole[:-9],
        whole + b"\0",
        whole[:500] + b"\xff\xff" + whole[502:],
        b"\x1f",
        b"plain text",
    ):
        with pytest.raises(BrokenFileError):
            _read(broken, "gz", block_bytes=700)


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(BrokenFileError("a/b.gz", "cut")))
    assert (error.path, error.reason, str(error)) == ("a/b.gz", "cut", "a/b.gz: cut")


def test_a_compressed_file_has_no_start_offset() -> None:
    with pytest.raises(ValueError, match="skip_records"):
        open_blocks(io.BytesIO(b""), path="f", compression="gz", start_offset=3)
