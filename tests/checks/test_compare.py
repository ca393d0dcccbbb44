"""How `verify` compares rows: different texts have different digests, and the rows of a table are a multiset."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.checks.compare import Differences, DigestStore, Seed, compare

texts = st.one_of(st.none(), st.text(st.characters(codec="utf-8"), max_size=40), st.sampled_from(["", "\0", "\0\0"]))


@settings(deadline=None)
@given(st.lists(texts, max_size=30), st.integers(0, 2**64 - 1))
def test_only_equal_texts_have_equal_digests(values: list[str | None], seed: int) -> None:
    digests = Seed(seed).of_texts(pa.array(values, pa.string())).tolist()
    assert [a == b for a in values for b in values] == [a == b for a in digests for b in digests]


@settings(deadline=None)
@given(st.lists(texts, max_size=20), st.integers(0, 20))
def test_a_digest_does_not_depend_on_the_arrow_type_or_on_the_place_in_the_array(
    values: list[str | None], skip: int
) -> None:
    seed = Seed(7)
    whole = seed.of_texts(pa.array(values, pa.large_string()))
    assert (seed.of_texts(pa.array(values, pa.string()).slice(skip)) == whole[skip:]).all()
    assert (seed.of_texts(pa.array(values, pa.string_view())) == whole).all()


def test_the_digest_of_a_row_depends_on_the_order_of_its_values() -> None:
    seed = Seed()
    a, b = (seed.of_texts(pa.array([text])) for text in ("a", "b"))
    assert seed.of_rows([a, b], 1) != seed.of_rows([b, a], 1)
    assert seed.of_rows([a, a], 1) != seed.of_rows([b, b], 1)


def test_the_same_text_has_different_digests_with_different_seeds() -> None:
    text = pa.array(["a"])
    assert Seed().of_texts(text) != Seed().of_texts(text)


Pairs = list[tuple[int, int]]


def _compared(folder: Path, source: Pairs, mirror: Pairs, rows_expected: int = 0) -> Differences:
    stores = []
    for name, pairs in (("source", source), ("mirror", mirror)):
        store = DigestStore(folder / name, rows_expected)
        for part in (pairs[:3], pairs[3:]):
            keys = np.array([key for key, _ in part], np.uint64)
            store.add(keys, np.array([row for _, row in part], np.uint64))
        assert store.rows == len(pairs)
        stores.append(store)
    return compare(stores[0], stores[1], examples=3)


@pytest.mark.parametrize("rows_expected", [0, 10_000_000])
def test_different_and_missing_and_extra_rows_are_counted_with_examples(tmp_path: Path, rows_expected: int) -> None:
    top = 1 << 63
    source = [(1, 10), (2, 20), (top + 3, 30), (4, 40), (5, 50), (5, 50)]
    mirror = [(top + 3, 31), (1, 10), (4, 40), (4, 40), (6, 60), (5, 50)]
    found = _compared(tmp_path, source, mirror, rows_expected)
    assert (found.missing, found.extra, found.different) == (2, 2, 1)
    assert found.keys["different"] == [top + 3]
    assert sorted(found.keys["missing"]) == [2, 5]
    assert sorted(found.keys["extra"]) == [4, 6]


def test_at_most_three_keys_of_missing_rows_are_kept_as_examples(tmp_path: Path) -> None:
    found = _compared(tmp_path, [(key, key) for key in range(100)], [])
    assert (found.missing, len(found.keys["missing"])) == (100, 3)


pairs = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=12)


@settings(deadline=None)
@given(pairs, pairs)
def test_source_and_mirror_are_compared_as_multisets_of_rows(
    tmp_path_factory: pytest.TempPathFactory, source: Pairs, mirror: Pairs
) -> None:
    found = _compared(tmp_path_factory.mktemp("compare"), source, mirror)
    surplus, lack = Counter(source) - Counter(mirror), Counter(mirror) - Counter(source)
    by_key = [
        (sum(n for (k, _), n in surplus.items() if k == key), sum(n for (k, _), n in lack.items() if k == key))
        for key in range(6)
    ]
    different = sum(min(pair) for pair in by_key)
    assert found.different == different
    assert found.missing == surplus.total() - different
    assert found.extra == lack.total() - different
