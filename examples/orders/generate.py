"""Writes orders as NDJSON files. The same seed gives the same bytes."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path


def write(folder: Path, files: int = 10, orders: int = 1000, seed: int = 0, first: int = 0) -> int:
    """Write files of so many orders each, from the number `first` on. Returns the number of lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(first, first + files):
        lines = [json.dumps(order(one, seed)) for one in range(number * orders, (number + 1) * orders)]
        (folder / f"{number:06d}.json").write_text("\n".join(lines) + "\n")
    return files * orders


def order(number: int, seed: int) -> dict[str, object]:
    """Return one order."""
    draw = random.Random(f"{seed} order {number}")
    return {"order_id": number, "customer": f"c{draw.randrange(200):03d}", "cents": draw.randrange(100, 10_000)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10)
    parser.add_argument("--orders", type=int, default=1000, help="orders in each file")
    parser.add_argument("--first", type=int, default=0, help="number of the first file; later files for a second run")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    written = write(Path("in"), arguments.files, arguments.orders, arguments.seed, arguments.first)
    print(f"{written:,} orders in {arguments.files} files below in/")
