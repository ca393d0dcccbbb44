"""Reads and writes deletion vectors in the format of Delta's protocol. A deletion vector lists the deleted rows of a
data file.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md#deletion-vector-format
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID, uuid4

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from pgcdc_assets.core.layout import Location
from pgcdc_assets.errors import LakeError
from pgcdc_assets.store import storage

_VERSION: Final = b"\x01"
_MAGIC: Final = (1681511377).to_bytes(4, "little")
"""The magic number before a vector in Roaring's portable 64-bit form."""
_Z85: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
"""The alphabet of Python's base85, which otherwise is the same encoding as Z85."""
_UUID_CHARACTERS: Final = 20

Descriptor = dict[str, Any]
"""The JSON object of a deletion vector in an ``add`` or ``remove`` action: ``storageType``, ``pathOrInlineDv``,
``offset``, ..."""


def vector_file(vector: Descriptor) -> str | None:
    """The file that contains the vector, relative to the table's folder; None if the vector itself is in the log
    (storage type ``i``). With storage type ``u``, the path is an optional folder, followed by a UUID in Z85. Raises
    LakeError for other storage types."""
    kind, text = vector["storageType"], vector["pathOrInlineDv"]
    if kind == "i":
        return None
    if kind != "u":
        raise LakeError(f"has the storage type {kind!r}, which pgcdc cannot read",
                        thing=f"deletion vector {text}")  # fmt: skip
    prefix, encoded = text[:-_UUID_CHARACTERS], text[-_UUID_CHARACTERS:]
    name = f"deletion_vector_{UUID(bytes=z85_decoded(encoded))}.bin"
    return f"{prefix}/{name}" if prefix else name


def read_vector(folder: Location, vector: Descriptor) -> BitMap64:
    """The positions of the deleted rows. Raises LakeError if the vector's file is missing or damaged."""
    data = _stored(folder, vector)
    if data[:4] != _MAGIC:
        raise LakeError(
            "a deletion vector in it begins with wrong bytes", thing=str(folder / (vector_file(vector) or "_delta_log"))
        )
    return BitMap64.deserialize(data[4:])


def write_vectors(folder: Location, vectors: Sequence[BitMap64]) -> list[Descriptor]:
    """Write the vectors to one new file, whose content is durable when this returns. No commit names the file yet."""
    uuid = uuid4()
    found: list[Descriptor] = []
    content = bytearray(_VERSION)
    for vector in vectors:
        data = _MAGIC + vector.serialize()
        found.append({
            "storageType": "u", "pathOrInlineDv": z85_encoded(uuid.bytes), "offset": len(content),
            "sizeInBytes": len(data), "cardinality": len(vector),
        })  # fmt: skip
        content += len(data).to_bytes(4, "big") + data + zlib.crc32(data).to_bytes(4, "big")
    place = folder / f"deletion_vector_{uuid}.bin"
    draft = storage.draft(place)
    draft.write(bytes(content))
    storage.put(draft, place)
    return found


def kept(rows: int, vector: BitMap64 | None) -> NDArray[np.bool_]:
    """A mask of a file's rows: true for each row that the vector does not delete. ``rows``: the number of rows."""
    mask = np.ones(rows, dtype=bool)
    if vector is not None:
        mask[np.asarray(vector.to_array(), dtype=np.int64)] = False
    return mask


def _stored(folder: Location, vector: Descriptor) -> bytes:
    size, name = int(vector["sizeInBytes"]), vector_file(vector)
    if name is None:
        return z85_decoded(vector["pathOrInlineDv"])[:size]
    try:
        content = storage.read(folder / name, int(vector.get("offset") or 0), size + 8)
    except FileNotFoundError:
        raise LakeError("does not exist, but the log of the Delta table names it", thing=str(folder / name)) from None
    stored, data, crc = content[:4], content[4 : size + 4], content[size + 4 :]
    if int.from_bytes(stored, "big") != size or int.from_bytes(crc, "big") != zlib.crc32(data):
        raise LakeError(
            "is damaged: the size or checksum of a deletion vector in it is wrong", thing=str(folder / name)
        )
    return data


def z85_decoded(text: str) -> bytes:
    """Decodes Z85 (ZeroMQ's RFC 32), which has five characters for four bytes."""
    return base64.b85decode(text.translate(str.maketrans(_Z85, _B85)))


def z85_encoded(data: bytes) -> str:
    """Encodes bytes in Z85. The length of ``data`` must be a multiple of four."""
    return base64.b85encode(data).decode().translate(str.maketrans(_B85, _Z85))
