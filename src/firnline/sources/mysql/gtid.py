"""Global transaction ids: MySQL's sets of them (with tags), and MariaDB's lists of the last one per domain."""

from __future__ import annotations

import struct
import uuid
from bisect import bisect_right
from collections.abc import Iterable


class GtidSet:
    """A set of MySQL's GTIDs: per server and tag, intervals of numbers, sorted, with the end not included."""

    def __init__(self) -> None:
        self._intervals: dict[tuple[str, str], list[list[int]]] = {}
        self._text: str | None = None

    @classmethod
    def parse(cls, text: str) -> GtidSet:
        """Return the set that MySQL writes so: `uuid:1-5:7:tag:1-3,uuid:1`.

        Raises:
            ValueError: the text is no such set.
        """
        result = cls()
        for part in text.replace("\n", "").split(","):
            words = [word.strip() for word in part.split(":")]
            if words == [""]:
                continue
            server, tag = str(uuid.UUID(words[0])), ""
            for word in words[1:]:
                if not word[:1].isdigit():
                    tag = word.lower()
                    continue
                first, _, last = word.partition("-")
                result._add_interval(server, tag, int(first), int(last or first) + 1)
        return result

    def copy(self) -> GtidSet:
        """Return a set that can be changed without this one."""
        result = GtidSet()
        result._intervals = {key: [list(one) for one in intervals] for key, intervals in self._intervals.items()}
        result._text = self._text
        return result

    def add(self, server: str, tag: str, number: int) -> None:
        """Add one GTID."""
        intervals = self._intervals.setdefault((server, tag), [])
        self._text = None
        if intervals and intervals[-1][1] == number:  # the usual case
            intervals[-1][1] = number + 1
        else:
            self._add_interval(server, tag, number, number + 1)

    def remove(self, server: str, tag: str, number: int) -> None:
        """Take out one GTID, if it is there."""
        self._text = None
        kept: list[list[int]] = []
        for start, end in self._intervals.get((server, tag), []):
            if start <= number < end:
                kept += [part for part in ([start, number], [number + 1, end]) if part[0] < part[1]]
            else:
                kept.append([start, end])
        if kept:
            self._intervals[server, tag] = kept
        else:
            self._intervals.pop((server, tag), None)

    def has(self, server: str, tag: str, number: int) -> bool:
        """Return whether a GTID is in the set."""
        intervals = self._intervals.get((server, tag), [])
        at = bisect_right(intervals, number, key=lambda one: one[0]) - 1
        return at >= 0 and number < intervals[at][1]

    def contains(self, other: GtidSet) -> bool:
        """Return whether every GTID of the other set is in this one."""
        return not other.minus(self)

    def minus(self, other: GtidSet) -> GtidSet:
        """Return the GTIDs of this set that the other has not."""
        result = GtidSet()
        for key, intervals in self._intervals.items():
            taken = other._intervals.get(key, [])
            for start, end in intervals:
                for first, last in taken:
                    if last <= start or first >= end:
                        continue
                    if first > start:
                        result._add_interval(*key, start, first)
                    start = last
                    if start >= end:
                        break
                if start < end:
                    result._add_interval(*key, start, end)
        return result

    def encode(self) -> bytes:
        """Return the bytes of the command that asks for all transactions that are not in the set."""
        is_tagged = any(tag for _, tag in self._intervals)
        count = len(self._intervals)
        out = [struct.pack("<Q", count) if not is_tagged else b"\1" + count.to_bytes(6, "little") + b"\1"]
        for (server, tag), intervals in sorted(self._intervals.items()):
            out.append(uuid.UUID(server).bytes)
            if is_tagged:
                out.append(bytes([len(tag) << 1]) + tag.encode())
            out.append(struct.pack("<Q", len(intervals)))
            out += [struct.pack("<QQ", start, end) for start, end in intervals]
        return b"".join(out)

    def _add_interval(self, server: str, tag: str, start: int, end: int) -> None:
        if not 0 < start < end:
            raise ValueError(f"{start}-{end - 1} is no interval of GTIDs")
        self._text = None
        merged: list[list[int]] = []
        for one in sorted([*self._intervals.get((server, tag), []), [start, end]]):
            if merged and one[0] <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], one[1])
            else:
                merged.append(one)
        self._intervals[server, tag] = merged

    def __str__(self) -> str:
        if self._text is None:
            parts: list[str] = []
            before = ""
            for (server, tag), intervals in sorted(self._intervals.items()):
                words = ":".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in intervals)
                if tag:
                    words = f"{tag}:{words}"
                if server == before:
                    parts[-1] += f":{words}"
                else:
                    parts.append(f"{server}:{words}")
                before = server
            self._text = ",".join(parts)
        return self._text

    def __bool__(self) -> bool:
        return bool(self._intervals)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GtidSet) and self._intervals == other._intervals

    __hash__ = None  # type: ignore[assignment]  # it changes


def parse_gtid(text: str) -> tuple[str, str, int]:
    """Return server, tag and number of one of MySQL's GTIDs: `uuid:7` or `uuid:tag:7`."""
    server, *tag, number = text.split(":")
    return server, tag[0] if tag else "", int(number)


def format_gtid(server: str, tag: str, number: int) -> str:
    """Return one of MySQL's GTIDs as MySQL writes it."""
    return f"{server}:{tag}:{number}" if tag else f"{server}:{number}"


class GtidList:
    """MariaDB's place in its log: of every domain the last transaction, `domain-server-number`."""

    def __init__(self, last: dict[int, str] | None = None) -> None:
        self._last = last or {}

    @classmethod
    def parse(cls, text: str) -> GtidList:
        """Return the list that MariaDB writes so: `0-1-100,1-1-7`.

        Raises:
            ValueError: the text is no such list.
        """
        words = [word.strip() for word in text.split(",") if word.strip()]
        if any(len(word.split("-")) != 3 for word in words):
            raise ValueError(f"{text} is no list of MariaDB's GTIDs")
        return cls({int(word.split("-")[0]): word for word in words})

    def contains(self, other: GtidList) -> bool:
        """Return whether every domain is as far as in `other`."""
        return all(self.number(domain) >= _number(gtid) for domain, gtid in other._last.items())

    def minus(self, other: GtidList) -> GtidList:
        """Return the domains in which `other` is not as far."""
        return GtidList({d: gtid for d, gtid in self._last.items() if other.number(d) < _number(gtid)})

    def set(self, domain: int, gtid: str) -> None:
        """Take this as the last transaction of its domain."""
        self._last[domain] = gtid

    def number(self, domain: int) -> int:
        """Return the number of the last transaction of a domain; 0 if there is none."""
        return _number(self._last.get(domain, "0-0-0"))

    def __str__(self) -> str:
        return join_gtids(self._last.values())


def _number(gtid: str) -> int:
    return int(gtid.rpartition("-")[2])


def join_gtids(gtids: Iterable[str]) -> str:
    """Return MariaDB's GTIDs as a list, by domain."""
    return ",".join(sorted(gtids, key=lambda one: int(one.split("-")[0])))
