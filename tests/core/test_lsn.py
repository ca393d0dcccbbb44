from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgcdc_assets.core.lsn import Lsn


@given(st.integers(0, (1 << 64) - 1))
def test_text_round_trip(value: int) -> None:
    lsn = Lsn(value)
    assert Lsn.parse(str(lsn)) == lsn == value
    assert int(f"{lsn:012X}", 16) == value


def test_lsn_is_written_as_postgres_writes_it() -> None:
    assert str(Lsn.parse("16/b374d848")) == "16/B374D848"
    assert f"{Lsn(0x16B374D848)}" == "16/B374D848"
    assert str(Lsn(0)) == "0/0"


@pytest.mark.parametrize("text", ["", "0", "0/", "/0", "x/1", "0/123456789", "0/0/0", "-1/0"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an LSN"):
        Lsn.parse(text)


@pytest.mark.parametrize("value", [-1, 1 << 64])
def test_other_numbers_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match="64-bit"):
        Lsn(value)
