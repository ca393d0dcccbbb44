"""The options that are requested from pgoutput on each version of the server."""

from __future__ import annotations

import pytest

from pgcdc_assets.errors import SourceNotReady
from pgcdc_assets.source.connect.pluginoptions import FIRST_VERSION, Origins, PluginOptions

NAMES = {"publication_names": '"p","odd, ""name"""', "messages": "true"}


@pytest.mark.parametrize("version", [14, 15, 16, 17, 18, 19])
def test_the_default_is_protocol_version_1(version: int) -> None:
    assert PluginOptions.of(version) == FIRST_VERSION
    assert FIRST_VERSION.given(["p", 'odd, "name"']) == {"proto_version": "1", **NAMES}


@pytest.mark.parametrize(
    ("version", "proto", "streaming"),
    [(14, "2", "on"), (15, "3", "on"), (16, "4", "parallel"), (18, "4", "parallel"), (19, "4", "parallel")],
)
def test_streaming_uses_the_mode_of_the_server_version(version: int, proto: str, streaming: str) -> None:
    options = PluginOptions.of(version, streaming=True)
    given = options.given(["p", 'odd, "name"'])
    assert given == {"proto_version": proto, "streaming": streaming, **NAMES}
    assert options.parallel == (streaming == "parallel")
    assert options.whole == FIRST_VERSION


@pytest.mark.parametrize(("version", "proto"), [(15, "3"), (16, "4"), (18, "4")])
def test_two_phase_does_not_require_streaming(version: int, proto: str) -> None:
    options = PluginOptions.of(version, two_phase=True)
    assert options.given(["p"]).items() >= {"proto_version": proto, "two_phase": "true"}.items()
    assert "streaming" not in options.given(["p"])
    assert options.whole == FIRST_VERSION


def test_two_phase_is_refused_where_the_server_lacks_it() -> None:
    with pytest.raises(SourceNotReady, match=r"PostgreSQL 14 .*; set `two_phase` to false"):
        PluginOptions.of(14, two_phase=True)


def test_messages_are_not_requested_by_default() -> None:
    options = PluginOptions.of(18, streaming=True, messages=False)
    assert "messages" not in options.given(["p"])
    assert "messages" not in options.whole.given(["p"])


@pytest.mark.parametrize(("version", "by_server"), [(14, False), (15, False), (16, True), (18, True)])
def test_the_server_leaves_out_origins_where_it_can(version: int, by_server: bool) -> None:
    options = PluginOptions.of(version, origins=Origins.NONE)
    assert (options.given(["p"]).get("origin") == "none") == by_server
    assert options.filters_origins is not by_server
    # The SQL functions, which read a backlog, get the same filter.
    assert options.whole == options
