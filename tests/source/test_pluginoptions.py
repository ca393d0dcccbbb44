"""What each version of the server is asked for."""

from __future__ import annotations

import pytest

from pgcdc_assets.errors import SourceNotReady
from pgcdc_assets.source.connect.pluginoptions import FIRST_VERSION, Origins, PluginOptions

NAMES = {"publication_names": '"p","odd, ""name"""', "messages": "true"}


@pytest.mark.parametrize("version", [14, 15, 16, 17, 18, 19])
def test_by_default_it_is_the_first_version(version: int) -> None:
    assert PluginOptions.of(version) == FIRST_VERSION
    assert FIRST_VERSION.given(["p", 'odd, "name"']) == {"proto_version": "1", **NAMES}


@pytest.mark.parametrize(
    ("version", "proto", "streaming"),
    [(14, "2", "on"), (15, "3", "on"), (16, "4", "parallel"), (18, "4", "parallel"), (19, "4", "parallel")],
)
def test_streaming_is_as_the_version_has_it(version: int, proto: str, streaming: str) -> None:
    options = PluginOptions.of(version, streaming=True)
    given = options.given(["p", 'odd, "name"'])
    assert given == {"proto_version": proto, "streaming": streaming, **NAMES}
    assert options.parallel == (streaming == "parallel")
    assert options.whole == FIRST_VERSION


@pytest.mark.parametrize(("version", "proto"), [(15, "3"), (16, "4"), (18, "4")])
def test_two_phase_needs_no_streaming(version: int, proto: str) -> None:
    options = PluginOptions.of(version, two_phase=True)
    assert options.given(["p"]).items() >= {"proto_version": proto, "two_phase": "true"}.items()
    assert "streaming" not in options.given(["p"])
    assert options.whole == FIRST_VERSION


def test_two_phase_is_refused_where_there_is_none() -> None:
    with pytest.raises(SourceNotReady, match=r"PostgreSQL 14 .*; set `two_phase` to false"):
        PluginOptions.of(14, two_phase=True)


def test_messages_come_if_they_are_asked_for() -> None:
    options = PluginOptions.of(18, streaming=True, messages=False)
    assert "messages" not in options.given(["p"])
    assert "messages" not in options.whole.given(["p"])


@pytest.mark.parametrize(("version", "by_server"), [(14, False), (15, False), (16, True), (18, True)])
def test_origins_are_left_out_by_the_server_where_it_can(version: int, by_server: bool) -> None:
    options = PluginOptions.of(version, origins=Origins.NONE)
    assert (options.given(["p"]).get("origin") == "none") == by_server
    assert options.filters_origins is not by_server
    # A backlog through the SQL functions is one of the same transactions.
    assert options.whole == options
