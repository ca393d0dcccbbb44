"""Deletion vectors: their bytes are as the protocol says, and other engines can read them."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from pgcdc_assets.core.layout import Location
from pgcdc_assets.delta.vectors import (
    kept,
    read_vector,
    vector_file,
    write_vectors,
    z85_decoded,
    z85_encoded,
)
from pgcdc_assets.errors import LakeError


def test_stored_bytes_follow_the_protocol(tmp_path: Path) -> None:
    """The bytes: a version, the size (big endian), the magic number, Roaring's portable 64-bit form, a checksum."""
    rows = BitMap64([3, 4, 7, 11, 18, 29, 1 << 33])
    (descriptor,) = write_vectors(Location.of(tmp_path), [rows])
    stored = (tmp_path / (vector_file(descriptor) or "")).read_bytes()
    size = int.from_bytes(stored[1:5], "big")
    assert stored[0] == 1
    assert len(stored) == 1 + 4 + size + 4
    assert int.from_bytes(stored[5:9], "little") == 1681511377
    assert int.from_bytes(stored[9:17], "little") == 2, "32-bit bitmaps, by the upper halves of the positions"
    assert int.from_bytes(stored[-4:], "big") == zlib.crc32(stored[5:-4])
    assert (descriptor["offset"], descriptor["sizeInBytes"], descriptor["cardinality"]) == (1, size, 7)


def test_a_vector_stored_in_the_log_is_read(tmp_path: Path) -> None:
    rows = BitMap64([3, 4, 7])
    (descriptor,) = write_vectors(Location.of(tmp_path), [rows])
    data = (tmp_path / (vector_file(descriptor) or "")).read_bytes()[5:-4]
    padded = data + bytes(-len(data) % 4)
    inline = {"storageType": "i", "pathOrInlineDv": z85_encoded(padded), "sizeInBytes": len(data), "cardinality": 3}
    assert vector_file(inline) is None
    assert read_vector(Location.of(tmp_path), inline) == rows


@pytest.mark.long
@given(st.lists(st.sets(st.integers(0, 1 << 33)), min_size=1, max_size=4))
def test_several_vectors_in_one_file_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, sets: list[set[int]]
) -> None:
    folder = tmp_path_factory.mktemp("vectors")
    descriptors = write_vectors(Location.of(folder), [BitMap64(rows) for rows in sets])
    assert len({vector_file(descriptor) for descriptor in descriptors}) == 1
    assert [set(read_vector(Location.of(folder), descriptor)) for descriptor in descriptors] == sets


@given(st.binary(max_size=40).map(lambda data: data[: len(data) // 4 * 4]))
def test_z85_text_is_decoded_to_the_encoded_bytes(data: bytes) -> None:
    assert z85_decoded(z85_encoded(data)) == data


@pytest.mark.parametrize("place", [1, 5, 9, 20, -1])
def test_a_damaged_vector_is_an_error(tmp_path: Path, place: int) -> None:
    (descriptor,) = write_vectors(Location.of(tmp_path), [BitMap64(range(0, 1000, 3))])
    file = tmp_path / (vector_file(descriptor) or "")
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    with pytest.raises(LakeError, match="damaged"):
        read_vector(Location.of(tmp_path), descriptor)


def test_rows_in_the_vector_are_not_kept() -> None:
    assert kept(4, None).tolist() == [True] * 4
    assert kept(4, BitMap64([0, 2])).tolist() == [False, True, False, True]
