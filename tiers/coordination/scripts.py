"""The scripts that run in the server, and the layout of its keys.

The directory of one medium, namespace and epoch is a growing Bloom filter in slices. A slice is one string of 64-byte
blocks. A digest chooses one block of the slice and six bits in that block, so a look costs one read. A slice takes
digests until there are 14 bits for each, and the next slice is larger by half: at most 2.7 bytes per block of the fleet
above the first 16,384 blocks, and about 0.2% false positives per slice.

All keys begin with the directory's name, and expire:

- the name itself: a hash with the generation (``gen``), the number of slices, the number of digests in the last one,
  and the generation for which the directory is ``complete``;
- ``NAME:GEN:NUMBER``: a slice;
- ``NAME:lease:DIGEST``: the claim of one machine to upload a block;
- ``NAME:touch:HOUR``: a Bloom filter of blocks that admission has declined in that hour;
- ``NAME:fill``: the claim of one machine to fill the directory from the medium.
"""

from __future__ import annotations

DIGEST_BYTES = 16
"""Length of a block's digest in bytes."""

FIRST_BLOCKS = 448
"""Number of 64-byte blocks of the first slice."""

BITS = 14
"""Bits of a full slice per digest."""

MOST_SLICES = 25
"""Largest number of slices. The next one would not fit into a string of 512 MiB."""

LIFE_MS = 24 * 3600 * 1000
"""Milliseconds after which a directory expires, with the blocks in it that left the medium since."""

_BLOOM = f"""
local function blocks(slice) return math.floor({FIRST_BLOCKS} * 1.5 ^ slice) end
local function offset(digests, at, count)
  local a, b, c, d = string.byte(digests, at, at + 3)
  return ((((a * 256 + b) * 256 + c) * 256 + d) % count) * 64
end
local function bits(digests, at)
  local found = {{}}
  for i = 1, 6 do
    local high, low = string.byte(digests, at + 2 + 2 * i, at + 3 + 2 * i)
    found[i] = (high * 256 + low) % 512
  end
  return found
end
local function holds(block, found)
  if #block ~= 64 then return false end
  for i = 1, 6 do
    local value = string.byte(block, math.floor(found[i] / 8) + 1)
    if math.floor(value / 2 ^ (found[i] % 8)) % 2 == 0 then return false end
  end
  return true
end
local function with(block, found)
  local values = {{string.byte(block, 1, 64)}}
  for i = 1, 64 do values[i] = values[i] or 0 end
  for i = 1, 6 do
    local at, bit = math.floor(found[i] / 8) + 1, 2 ^ (found[i] % 8)
    if math.floor(values[at] / bit) % 2 == 0 then values[at] = values[at] + bit end
  end
  return string.char(unpack(values))
end
local function sound(name, gen, slices)
  if not gen or not slices or not (slices >= 1 and slices <= {MOST_SLICES}) or slices % 1 ~= 0 then return false end
  for slice = 0, slices - 1 do
    if redis.call('STRLEN', name .. ':' .. gen .. ':' .. slice) ~= blocks(slice) * 64 then return false end
  end
  return true
end
"""

ADD = (
    _BLOOM
    + f"""
local name, digests, life = KEYS[1], ARGV[1], tonumber(ARGV[3])
local state = redis.call('HMGET', name, 'gen', 'slices', 'count')
local gen, slices, count = state[1], tonumber(state[2]), tonumber(state[3])
local function open(slice)
  local key = name .. ':' .. gen .. ':' .. slice
  redis.call('SETRANGE', key, blocks(slice) * 64 - 1, '\\0')
  redis.call('PEXPIRE', key, life + 3600000)
end
if not count or not sound(name, gen, slices) then
  gen, slices, count = ARGV[2], 1, 0
  redis.call('HSET', name, 'gen', gen, 'slices', 1, 'count', 0)
  redis.call('PEXPIRE', name, life)
  open(0)
end
for at = 1, #digests, {DIGEST_BYTES} do
  local found, held, last, where = bits(digests, at), false, nil, nil
  for slice = slices - 1, 0, -1 do
    local start = offset(digests, at, blocks(slice))
    local block = redis.call('GETRANGE', name .. ':' .. gen .. ':' .. slice, start, start + 63)
    if not last then last, where = block, start end
    held = holds(block, found)
    if held then break end
  end
  if not held then
    redis.call('SETRANGE', name .. ':' .. gen .. ':' .. (slices - 1), where, with(last, found))
    count = count + 1
    if count * {BITS} >= blocks(slices - 1) * 512 and slices < {MOST_SLICES} then
      open(slices)
      slices, count = slices + 1, 0
    end
  end
end
redis.call('HSET', name, 'slices', slices, 'count', count)
return gen
"""
)
"""Add digests to the directory.

A directory that lost a slice, or whose numbers are damaged, begins again under a new generation.

KEYS: name; ARGV: digests, generation of a new directory, life; returns the generation.
"""

LOOK = (
    _BLOOM
    + f"""
local name, digests = KEYS[1], ARGV[1]
local state = redis.call('HMGET', name, 'gen', 'slices', 'complete')
local gen, slices = state[1], tonumber(state[2])
local answers = {{}}
if not sound(name, gen, slices) then gen = false end
local whole = gen and state[3] == gen
for at = 1, #digests, {DIGEST_BYTES} do
  local found, held = bits(digests, at), false
  for slice = gen and slices - 1 or -1, 0, -1 do
    local start = offset(digests, at, blocks(slice))
    held = holds(redis.call('GETRANGE', name .. ':' .. gen .. ':' .. slice, start, start + 63), found)
    if held then break end
  end
  answers[#answers + 1] = held and '1' or '0'
end
return (whole and '1' or '0') .. table.concat(answers)
"""
)
"""Look digests up.

KEYS: name; ARGV: digests; returns "1" if the directory is complete, then "1" for each that is held, else "0".
"""

COMPLETE = """
if redis.call('HGET', KEYS[1], 'gen') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'complete', ARGV[1])
return 1
"""
"""Record that the directory is complete; KEYS: name; ARGV: the generation that was filled."""

CLAIM = f"""
local granted = {{}}
for at = 1, #ARGV[1], {DIGEST_BYTES} do
  local key = KEYS[1] .. ':lease:' .. string.sub(ARGV[1], at, at + {DIGEST_BYTES - 1})
  local mine = redis.call('SET', key, ARGV[2], 'NX', 'PX', ARGV[3])
  if not mine then redis.pcall('PEXPIRE', key, ARGV[3], 'LT') end
  granted[#granted + 1] = mine and '1' or '0'
end
return table.concat(granted)
"""
"""Claim uploads.

A claim that is refused ends the other one after as long as its own would last; servers before 7.0 cannot do that.

KEYS: name; ARGV: digests, owner, milliseconds; returns "1" for each that is granted.
"""

RELEASE = f"""
local ended = 0
for at = 1, #ARGV[1], {DIGEST_BYTES} do
  local key = KEYS[1] .. ':lease:' .. string.sub(ARGV[1], at, at + {DIGEST_BYTES - 1})
  if redis.pcall('GETRANGE', key, 0, -1) == ARGV[2] then ended = ended + redis.call('DEL', key) end
end
return ended
"""
"""End claims.

A claim that has lapsed may be another machine's by now, and stays.

KEYS: name; ARGV: digests, owner; returns the number of claims that were ended.
"""

TOUCH = (
    _BLOOM
    + f"""
local hour = math.floor(redis.call('TIME')[1] / 3600)
local now, before = KEYS[1] .. ':touch:' .. hour, KEYS[1] .. ':touch:' .. (hour - 1)
local answers = {{}}
for at = 1, #ARGV[1], {DIGEST_BYTES} do
  local found, start = bits(ARGV[1], at), offset(ARGV[1], at, 16384)
  local block = redis.call('GETRANGE', now, start, start + 63)
  local held = holds(block, found)
  if not held then
    redis.call('SETRANGE', now, start, with(block, found))
    held = holds(redis.call('GETRANGE', before, start, start + 63), found)
  end
  answers[#answers + 1] = held and '1' or '0'
end
redis.call('PEXPIRE', now, 7500000)
return table.concat(answers)
"""
)
"""Count touches of the last one to two hours.

KEYS: name; ARGV: digests; returns "1" for each that was touched before, else "0".
"""

ALL = (ADD, LOOK, COMPLETE, CLAIM, RELEASE, TOUCH)
"""All scripts, to load after a connection was made."""
