"""The wire formats of event logs, read without their libraries: protobuf fields, TFRecord and W&B framing.

Each reader is bounded by the bytes it is given; a length that points past them ends in SourceError.
Sources: protobuf.dev/programming-guides/encoding; tensorflow/core/lib/io/record_writer.h; RFC 3720 (CRC-32C);
the log format of LevelDB (doc/log_format.md), which W&B writes with plain CRC-32.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from harness.imports.source import MIB, SourceError

MAX_FIELDS = 2_000_000
MAX_RECORD_BYTES = 64 * MIB
CHECKED_BYTES = MIB // 4
"""Larger TFRecords hold images and graphs; they are skipped, not checked byte by byte."""
_BLOCK = 32768
_HEADER = 7
_WANDB_IDENT, _WANDB_MAGIC = b":W&B", 0xBEE1
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4

Field = tuple[int, int, int | bytes]
"""Field number, wire type, value: an integer for varints, the bytes for everything else."""


def fields(data: bytes) -> Iterator[Field]:
    """Yield the fields of one protobuf message, in the order of its bytes.

    Raises:
        SourceError: on a damaged message.
    """
    place = count = 0
    while place < len(data):
        count += 1
        if count > MAX_FIELDS:
            raise SourceError(f"a message has more than {MAX_FIELDS} fields")
        key, place = varint(data, place)
        wire = key & 7
        if wire == 0:
            value: int | bytes
            value, place = varint(data, place)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            value, place = data[place : place + size], place + size
        elif wire == 2:
            size, place = varint(data, place)
            value, place = data[place : place + size], place + size
        else:
            raise SourceError(f"a message has the unknown wire type {wire}")
        if place > len(data):
            raise SourceError("a message ends inside a field")
        yield key >> 3, wire, value


def varint(data: bytes, place: int) -> tuple[int, int]:
    """Return the varint at `place` and the place after it.

    Raises:
        SourceError: when it is cut off or longer than 64 bits.
    """
    value = 0
    for index in range(10):
        if place + index >= len(data):
            raise SourceError("a message ends inside a number")
        byte = data[place + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, place + index + 1
    raise SourceError("a number has more than 64 bits")


def signed(value: int) -> int:
    """Return a varint as the int64 it stands for."""
    return value - (1 << 64) if value >= 1 << 63 else value


def blob(item: Field) -> bytes:
    """Return the bytes of a length-delimited field; empty for any other wire type."""
    return item[2] if item[1] == 2 and isinstance(item[2], bytes) else b""


def text(item: Field) -> str:
    """Return a string field; bytes that are no UTF-8 are replaced."""
    return blob(item).decode("utf-8", "replace")


def integer(item: Field) -> int:
    """Return a varint field as int64; 0 for any other wire type."""
    return signed(item[2]) if isinstance(item[2], int) else 0


def real(item: Field) -> float | None:
    """Return a float or double field; None for any other wire type."""
    if item[1] == 5 and isinstance(item[2], bytes):
        return float(struct.unpack("<f", item[2])[0])
    if item[1] == 1 and isinstance(item[2], bytes):
        return float(struct.unpack("<d", item[2])[0])
    return None


def _crc32c_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_CRC32C = _crc32c_table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of bytes."""
    value = 0xFFFFFFFF
    for byte in data:
        value = (value >> 8) ^ _CRC32C[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """Return the CRC-32C as TFRecord stores it: rotated right by 15 bits plus a constant."""
    value = crc32c(data)
    return (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def tf_records(data: bytes, where: str) -> Iterator[bytes | None]:
    """Yield the records of a TFRecord file; None for one that is too large to hold scalars.

    A last record that is cut off ends the file quietly: a writer that was killed leaves one.

    Raises:
        SourceError: naming the byte, when a checksum does not match.
    """
    place = 0
    while place + 12 <= len(data):
        head = data[place : place + 8]
        (size,), (crc,) = struct.unpack("<Q", head), struct.unpack("<I", data[place + 8 : place + 12])
        if crc != masked_crc32c(head):
            raise SourceError(f"{where} is damaged at byte {place}: the length's checksum does not match")
        start, end = place + 12, place + 12 + size
        if end + 4 > len(data):
            return
        if size > CHECKED_BYTES:
            yield None
        else:
            payload = data[start:end]
            if struct.unpack("<I", data[end : end + 4])[0] != masked_crc32c(payload):
                raise SourceError(f"{where} is damaged at byte {start}: the record's checksum does not match")
            yield payload
        place = end + 4


def wandb_records(data: bytes, where: str) -> Iterator[bytes]:
    """Yield the records of a `.wandb` file.

    A cut-off end is left out quietly: a run that was killed leaves one.

    Raises:
        SourceError: when it is no such file, or naming the byte, when a checksum does not match.
    """
    if len(data) < _HEADER or data[:4] != _WANDB_IDENT or struct.unpack("<H", data[4:6])[0] != _WANDB_MAGIC:
        raise SourceError(f"{where} is no W&B log (its first bytes are others)")
    place = _HEADER
    parts: list[bytes] = []
    size = 0
    while place + _HEADER <= len(data):
        room = _BLOCK - place % _BLOCK
        if room < _HEADER:  # the rest of a block is padding
            place += room
            continue
        crc, length, kind = struct.unpack("<IHB", data[place : place + _HEADER])
        if kind == 0 and length == 0 and crc == 0:  # a preallocated or padded block
            place += room
            continue
        payload = data[place + _HEADER : place + _HEADER + length]
        if len(payload) < length:
            return
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or zlib.crc32(payload, zlib.crc32(bytes([kind]))) != crc:
            raise SourceError(f"{where} is damaged at byte {place}: a record's checksum does not match")
        place += _HEADER + length
        if kind in (_FULL, _FIRST):
            parts, size = [], 0
        parts.append(payload)
        size += length
        if size > MAX_RECORD_BYTES:
            raise SourceError(f"{where} has a record larger than {MAX_RECORD_BYTES // MIB} MiB")
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
            parts, size = [], 0
