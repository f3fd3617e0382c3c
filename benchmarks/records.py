"""Write folders of realistic nested NDJSON records for benchmarks."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from zlib_ng import zlib_ng

_WORDS = [
    "amber",
    "brisk",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "glint",
    "harbor",
    "island",
    "juniper",
    "kestrel",
    "lumen",
    "meadow",
    "nectar",
    "onyx",
    "pine",
    "quartz",
    "ridge",
    "slate",
    "timber",
    "umber",
    "velvet",
    "willow",
    "yonder",
    "zephyr",
]
_NAMES = [
    "Ada",
    "Björn",
    "Chloé",
    "Dmitri",
    "Elif",
    "Farah",
    "Gustav",
    "Hana",
    "Igor",
    "José",
    "Kaja",
    "Lars",
    "Mina",
    "Noor",
    "Oskar",
    "Pia",
]


def lines(records: int, seed: int, first_id: int = 0) -> Iterator[str]:
    """Yield records of about 256 bytes; the same seed gives the same text."""
    rng = random.Random(seed)
    unit, pick = rng.random, rng.choice
    for number in range(first_id, first_id + records):
        second = number % 86_400
        stamp = (
            f"2024-0{1 + number % 9}-{10 + number % 18}T{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
            f".{int(unit() * 1000):03}Z"
        )
        tags = '","'.join([pick(_WORDS) for _ in range(1 + int(unit() * 2))])
        items = ",".join(
            [
                f'{{"sku":"{pick(_WORDS)}-{int(unit() * 9999)}","qty":{1 + int(unit() * 9)},'
                f'"price":{int(unit() * 99999) / 100}}}'
                for _ in range(int(unit() * 3))
            ]
        )
        note = f'"{pick(_WORDS)} {pick(_WORDS)} {pick(_WORDS)}"' if unit() < 0.5 else "null"
        yield (
            f'{{"id":{number},"ts":"{stamp}","user":{{"id":{int(unit() * 1e6)},"name":"{pick(_NAMES)} {pick(_WORDS)}",'
            f'"geo":{{"lat":{unit() * 180 - 90!r},"lon":{unit() * 360 - 180!r}}}}},"tags":["{tags}"],'
            f'"items":[{items}],"ok":{"true" if unit() < 0.7 else "false"},"note":{note}}}\n'
        )


def write_files(folder: Path, files: int, records_per_file: int, seed: int = 0, level: int = 6) -> list[Path]:
    """Write `files` gzip files of records, named in order, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(files):
        path = folder / f"part-{number:05}.ndjson.gz"
        packer = zlib_ng.compressobj(level, zlib_ng.DEFLATED, 31)
        with path.open("wb") as out:
            chunk: list[str] = []
            for line in lines(records_per_file, seed * 1_000_003 + number, number * records_per_file):
                chunk.append(line)
                if len(chunk) == 10_000:
                    out.write(packer.compress("".join(chunk).encode()))
                    chunk.clear()
            out.write(packer.compress("".join(chunk).encode()) + packer.flush())
        paths.append(path)
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", type=int, default=1)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for written in write_files(args.folder, args.files, args.records, args.seed):
        print(written, written.stat().st_size)
