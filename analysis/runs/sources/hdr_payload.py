"""Decode one HdrHistogram payload of any version (V0, V1, V2) into values and their counts.

The library's decoder reads V2 only. The older layouts follow the Java code: V0 has a total count
and no length in its header, and both have plain big-endian counters of 2, 4 or 8 bytes.
"""

import base64
import binascii
import math
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from hdrh.histogram import HdrHistogram
from numpy.typing import NDArray

Ints = NDArray[np.int64]
COMPRESSED = {0x1C849309: 0, 0x1C849302: 1, 0x1C849304: 2}
PLAIN = {0x1C849308: 0, 0x1C849301: 1, 0x1C849303: 2}
WORDS = {2: ">i2", 4: ">i4", 8: ">i8"}
MOST_BYTES = 64 << 20  # unpacked size of one histogram


@dataclass(frozen=True, slots=True)
class Counted:
    """The values of a histogram, ascending and in its own unit, and the count of each.

    A value is the highest that shares its counter.
    """

    values: Ints
    counts: Ints
    version: int

    @property
    def total(self) -> int:
        return int(self.counts.sum())


def decode_payload(text: str) -> Counted:
    """Decode the last field of a line of an .hlog.

    Raises:
        ValueError: it is not a histogram, or is damaged.
    """
    try:
        raw = base64.b64decode(text, validate=True)
        cookie, length = struct.unpack_from(">II", raw)
        version = COMPRESSED.get(cookie & ~0xF0)
        if version is None:
            raise ValueError("no compressed histogram of V0, V1 or V2")
        unpacker = zlib.decompressobj()
        unpacked = unpacker.decompress(raw[8 : 8 + length], MOST_BYTES)
        if unpacker.unconsumed_tail:
            raise ValueError(f"a histogram of more than {MOST_BYTES >> 20} MiB")
        if version == 2:
            histogram = HdrHistogram.decode(text)
            counts = np.frombuffer(histogram.counts, dtype=np.int64).copy()
            shape = (1, histogram.lowest_trackable_value, histogram.significant_figures)
        else:
            counts, shape = _plain(unpacked)
    except (binascii.Error, struct.error, zlib.error) as error:
        raise ValueError(str(error)) from error
    except ValueError:
        raise
    except Exception as error:  # the library's decoder raises classes of its own
        raise ValueError(str(error) or type(error).__name__) from error
    used = np.flatnonzero(counts)
    return Counted(_values(used, shape[1], shape[2]), counts[used], version)


def _plain(data: bytes) -> tuple[Ints, tuple[int, int, int]]:
    """Read header and counters of V0 or V1."""
    (cookie,) = struct.unpack_from(">i", data)
    version = PLAIN.get(cookie & ~0xF0)
    word = (cookie & 0xF0) >> 4 & 0xE
    if version == 0:
        digits, lowest, highest, _ = struct.unpack_from(">iqqq", data, 4)
        start, length = 4 + struct.calcsize(">iqqq"), len(data)
    elif version == 1:
        length, _, digits, lowest, highest, _ = struct.unpack_from(">iiiqqd", data, 4)
        start = 4 + struct.calcsize(">iiiqqd")
    else:
        raise ValueError("the packed histogram is of another version than its envelope")
    if word not in WORDS or not 0 <= digits <= 5 or not 0 < lowest <= highest:
        raise ValueError("its header is damaged")
    body = data[start : start + length]
    body = body[: len(body) - len(body) % word]
    return np.frombuffer(body, dtype=WORDS[word]).astype(np.int64), (version, lowest, digits)


def _values(indices: Ints, lowest: int, digits: int) -> Ints:
    """Return the highest value of each counter, as `highestEquivalentValue` in Java."""
    magnitude = math.ceil(math.log2(2 * 10**digits)) if digits else 1
    half_magnitude, unit = max(magnitude, 1) - 1, int(math.log2(lowest))
    half = 1 << half_magnitude
    bucket = (indices >> half_magnitude) - 1
    sub_bucket = (indices & (half - 1)) + half
    first = bucket < 0
    sub_bucket = np.where(first, sub_bucket - half, sub_bucket)
    shift = np.where(first, 0, bucket) + unit
    return np.asarray(((sub_bucket + 1) << shift) - 1, dtype=np.int64)
