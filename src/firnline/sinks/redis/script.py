"""The script that writes one range of rows and moves the head, or moves the head alone.

Redis runs a script as one step, and logs what it wrote as one transaction. The script checks everything before its
first write, so that it writes all of its rows or none: who holds the sink (generation and run), where the head is
(epoch, row and entry), who owns the target, the types of the keys, and that stream ids grow. A user that may not write
rows fails at the first one; that it may write the head is proven by the claim, which comes before every row.

    KEYS  head, owner, then the stream, or the key of each row
    ARGV  the arguments below, then the rows:
          stream  id, number of arguments, field, value, ...
          hash    w or d, number of arguments, field, value, ...
                  k, number of arguments, number of fields that stay, their names, field, value, ...
                  m, 0: the key becomes that of the next row
          string  w or d, number of arguments, value
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firnline.checkpoint.codec import canonical
from firnline.sinks.follower import FollowerHead

SCRIPT = """
local held = redis.call('HMGET', KEYS[1], 'holder', 'at')
if (held[1] or '') ~= ARGV[2] then return {'held'} end
if (held[2] or '') ~= ARGV[3] then return {'held'} end
local owner = redis.call('GET', KEYS[2])
if owner and owner ~= ARGV[10] then return {'owner', owner} end
local mode, first = ARGV[1], 13
local count = 0
if mode == 'stream' then
  local kind = redis.call('TYPE', KEYS[3]).ok
  if kind ~= 'none' and kind ~= 'stream' then return {'type', kind} end
  if kind == 'stream' and ARGV[first] then
    local info = redis.call('XINFO', 'STREAM', KEYS[3])
    local last = ''
    for i = 1, #info, 2 do if info[i] == 'last-generated-id' then last = info[i + 1] end end
    local a, b = string.match(last, '^(%d+)-(%d+)$')
    local c, d = string.match(ARGV[first], '^(%d+)-(%d+)$')
    a, b, c, d = tonumber(a), tonumber(b), tonumber(c), tonumber(d)
    if a > c or (a == c and b >= d) then return {'ids', last} end
  end
elseif mode ~= 'head' then
  local bad = {'bad'}
  for i = 3, #KEYS do
    local kind = redis.call('TYPE', KEYS[i]).ok
    if kind ~= 'none' and kind ~= mode then
      bad[#bad + 1] = tostring(i - 3)
      bad[#bad + 1] = kind
    end
  end
  if #bad > 1 then return bad end
end
if not owner then redis.call('SET', KEYS[2], ARGV[10]) end
local at = first
if mode == 'stream' then
  while ARGV[at] do
    local n = tonumber(ARGV[at + 1])
    if ARGV[11] == '' then
      redis.call('XADD', KEYS[3], ARGV[at], unpack(ARGV, at + 2, at + 1 + n))
    else
      redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[11], ARGV[at], unpack(ARGV, at + 2, at + 1 + n))
    end
    at = at + 2 + n
  end
elseif mode ~= 'head' then
  local number = 3
  while ARGV[at] do
    local n = tonumber(ARGV[at + 1])
    if ARGV[at] == 'd' then
      redis.call('DEL', KEYS[number])
    elseif ARGV[at] == 'm' then
      if redis.call('EXISTS', KEYS[number]) == 1 then
        redis.call('RENAME', KEYS[number], KEYS[number + 1])
      else
        redis.call('DEL', KEYS[number + 1])
      end
    elseif ARGV[at] == 'k' then
      local values, kept = at + 3 + tonumber(ARGV[at + 2]), {}
      for i = at + 3, values - 1 do
        local old = redis.call('HGET', KEYS[number], ARGV[i])
        if old then
          kept[#kept + 1] = ARGV[i]
          kept[#kept + 1] = old
        end
      end
      redis.call('DEL', KEYS[number])
      redis.call('HSET', KEYS[number], unpack(ARGV, values, at + 1 + n))
      if #kept > 0 then redis.call('HSET', KEYS[number], unpack(kept)) end
    elseif mode == 'hash' then
      redis.call('DEL', KEYS[number])
      redis.call('HSET', KEYS[number], unpack(ARGV, at + 2, at + 1 + n))
    else
      redis.call('SET', KEYS[number], ARGV[at + 2])
    end
    at = at + 2 + n
    number = number + 1
  end
end
redis.call('HSET', KEYS[1], 'holder', ARGV[4], 'at', ARGV[5], 'generation', ARGV[6], 'epoch', ARGV[7],
  'row', ARGV[8], 'record', ARGV[9], 'target', ARGV[12])
return {'done'}
"""


@dataclass(frozen=True, slots=True)
class Packed:
    """Arguments in the wire format of Redis: how many, and their bytes in order."""

    count: int
    parts: Sequence[bytes | memoryview]


NOTHING = Packed(0, ())


@dataclass(frozen=True, slots=True)
class Names:
    """The keys of one call: head, owner, and the target, which is the stream, or the template of keys."""

    head: str
    owner: str
    target: str
    owned_by: str  # the sink that may write to the target


def pack_call(
    sha: str,
    names: Names,
    mode: str,
    expected: FollowerHead | None,
    new: FollowerHead,
    keys: Packed = NOTHING,
    rows: Packed = NOTHING,
    maxlen: int | None = None,
) -> list[bytes | memoryview]:
    """Return one call of the script in the wire format; mode `head` moves the head alone."""
    holder, at = describe_head(expected)
    new_holder, new_at = describe_head(new)
    own_keys = [names.head, names.owner, *([names.target] if mode == "stream" else [])]
    settings: list[str | bytes] = [
        mode,
        holder,
        at,
        new_holder,
        new_at,
        str(new.generation),
        str(new.partial.epoch if new.partial else new.epoch),
        str(new.row),
        canonical(new.to_json()),
        names.owned_by,
        "" if maxlen is None else str(maxlen),
        names.target,
    ]
    opening: list[str | bytes] = ["EVALSHA", sha, str(len(own_keys) + keys.count), *own_keys]
    total = len(opening) + keys.count + len(settings) + rows.count
    return [
        b"*%d\r\n" % total + b"".join(map(bulk, opening)),
        *keys.parts,
        b"".join(map(bulk, settings)),
        *rows.parts,
    ]


def bulk(value: str | bytes) -> bytes:
    """Return one argument in the wire format."""
    data = value.encode() if isinstance(value, str) else value
    return b"$%d\r\n%b\r\n" % (len(data), data)


def describe_head(head: FollowerHead | None) -> tuple[str, str]:
    """Return who holds a sink, and where its head is: what a call expects, in two texts."""
    if head is None:
        return "", ""
    entry = head.partial or head.entry
    return f"{head.generation}/{head.run}", f"{head.epoch}/{head.row}/{entry.checksum if entry else ''}"
