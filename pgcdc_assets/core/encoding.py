"""The encodings that a PostgreSQL database may have. If the server converted texts to UTF8 for us, it would end the
whole stream or copy at the first text that it cannot convert. So pgcdc receives texts in the server's own encoding, and
this module decodes them value by value, with the same result as the server's conversion. Python's codecs agree with
PostgreSQL's conversions, except for a few characters of Japanese and Korean. :data:`_BY_SERVER` lists these characters;
``tests/source/test_connection.py`` compares all encodings."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from pgcdc_assets.errors import UsageError

_MARK: Final = "\ufffd"
_MARKED: Final = re.compile(f"{_MARK}([0-9a-f]{{2}})")
"""Matches a byte that is not text, as :meth:`Encoding.shown` writes it."""
_SQL_ASCII: Final = "SQL_ASCII"


@dataclass(frozen=True)
class Encoding:
    """One encoding; ``name`` is PostgreSQL's name for it."""

    name: str
    codec: str
    more: Mapping[bytes, str] = field(default_factory=dict)
    """Characters that Python's codec lacks, by their bytes."""
    other: Mapping[str, str] = field(default_factory=dict)
    """Maps each character that Python's codec decodes differently than the server to the server's character."""

    def __post_init__(self) -> None:
        codecs.register_error(self._strictly, self._handler(self._refused))
        codecs.register_error(self._marked, self._handler(_mark))

    @classmethod
    def of(cls, name: str | None) -> Encoding:
        """The encoding in which to request texts, for a server whose encoding has the name ``name``. It is UTF8 for the
        server encodings that Python cannot read; the server then converts the texts."""
        return _BY_NAME.get(name or "", UTF8)

    @property
    def unicode(self) -> bool:
        """Whether texts are read as UTF-8. SQL_ASCII allows any bytes as text, and most of its texts are UTF-8."""
        return self.codec == "utf-8"

    @property
    def title(self) -> str:
        """The name to show to the user."""
        return "UTF-8" if self.unicode else self.name

    def decode(self, raw: bytes) -> str:
        """The text. Raises UnicodeDecodeError for bytes that are not text."""
        return self._of_server(raw.decode(self.codec, self._strictly))

    def shown(self, raw: bytes) -> str:
        """The text. Each byte that is not text is written as U+FFFD and two hex digits."""
        return self._of_server(raw.decode(self.codec, self._marked))

    def reread(self, text: str) -> str:
        """Corrects a text that :meth:`shown` has decoded as UTF-8, although its bytes are in this encoding."""
        return text if self.unicode or text.isascii() else self.shown(_unmarked(text))

    def encode(self, text: str) -> bytes:
        """The reverse of :meth:`decode`. Raises UsageError for a character that the encoding lacks."""
        for character, of_server in self.other.items():
            text = text.replace(of_server, character)
        try:
            return text.encode(self.codec, self._strictly)
        except UnicodeEncodeError as error:
            lacking = text[error.start : error.end]
            raise UsageError(f"{lacking!r} does not exist in the source's encoding, {self.name}") from None

    def _of_server(self, text: str) -> str:
        for character, of_server in self.other.items():
            text = text.replace(character, of_server)
        return text

    @property
    def _strictly(self) -> str:
        return f"pgcdc-{self.name}"

    @property
    def _marked(self) -> str:
        return f"pgcdc-{self.name}-marked"

    def _handler(self, otherwise: _Handler) -> _Handler:
        known = {text: raw for raw, text in reversed(tuple(self.more.items()))}

        def handle(error: UnicodeError) -> tuple[str | bytes, int]:
            if isinstance(error, UnicodeEncodeError) and error.object[error.start] in known:
                return known[error.object[error.start]], error.start + 1
            if isinstance(error, UnicodeDecodeError) and self.more:
                for end in (error.start + 2, error.start + 3):
                    if (found := self.more.get(error.object[error.start : end])) is not None:
                        return found, end
            return otherwise(error)

        return handle

    @staticmethod
    def _refused(error: UnicodeError) -> tuple[str | bytes, int]:
        raise error


_Handler = Callable[[UnicodeError], tuple[str | bytes, int]]


def marked(text: str) -> bool:
    """Whether :meth:`Encoding.shown` found a byte that is not text."""
    return _MARKED.search(text) is not None


def _mark(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    # Mark one byte at a time, because the number of bytes that a codec refuses at once depends on the bytes that
    # follow.
    return f"{_MARK}{error.object[error.start]:02x}", error.start + 1


def _unmarked(text: str) -> bytes:
    """The original bytes of a text that :meth:`Encoding.shown` has decoded as UTF-8."""
    pieces = _MARKED.split(text)
    return b"".join(bytes.fromhex(piece) if place % 2 else piece.encode() for place, piece in enumerate(pieces))


def _row(lead: str, first: int, characters: str) -> dict[bytes, str]:
    """A row of a code table: the bytes of each character. ``lead`` is in all of them; ``first`` is the last byte of the
    first character. Ideographic spaces stand for gaps."""
    return {bytes.fromhex(lead) + bytes([first + place]): character
            for place, character in enumerate(characters) if character != "\u3000"}  # fmt: skip


# Characters that Python's codec lacks: row 13 (NEC's extensions), and the rows of IBM's extensions.
_EUC_JP: Final = {
    **_row("ad", 0xA1, "①②③④⑤⑥⑦⑧⑨⑩⑪⑫⑬⑭⑮⑯⑰⑱⑲⑳ⅠⅡⅢⅣⅤⅥⅦⅧⅨⅩ\u3000㍉㌔㌢㍍㌘㌧㌃㌶㍑㍗㌍㌦㌣㌫㍊㌻㎜㎝㎞㎎㎏㏄㎡"),
    **_row("ad", 0xDF, "㍻〝〟№㏍℡㊤㊥㊦㊧㊨㈱㈲㈹㍾㍽㍼≒≡∫∮∑√⊥∠∟⊿∵∩∪"),
    **_row("8ff3", 0xF3, "ⅰⅱⅲⅳⅴⅵⅶⅷⅸⅹⅠⅡ"),
    **_row("8ff4", 0xA1, "ⅢⅣⅤⅥⅦⅧⅨⅩ＇＂㈱№℡炻仼僴凬匇匤\ufa0e咊坙\ufa0f\ufa10增寬峵嵓\ufa11德悅愠敎昻晥\ufa12\uf929"),
    **_row("8ff4", 0xC6, "栁\ufa13\ufa14橫櫢淸淲瀨\ufa15\ufa16甁皂皞\ufa17礰\ufa18\ufa19\ufa1a\ufa1b竧"),
    **_row("8ff4", 0xDA, "\ufa1c\ufa1d綠緖\ufa1e荢\ufa1f薰\ufa20\ufa21蠇\ufa22譿賴赶\ufa23\ufa24\ufa25郞"),
    **_row("8ff4", 0xED, "\ufa26鄕\ufa27\ufa28閒\uf9dc\ufa29霻靍靑\ufa2a\ufa2b\ufa2c馞髙魲\ufa2d黑"),
}  # fmt: skip
_SINGLE_BYTE: Final = {
    "LATIN1": "iso8859-1", "LATIN2": "iso8859-2", "LATIN3": "iso8859-3", "LATIN4": "iso8859-4", "LATIN5": "iso8859-9",
    "LATIN6": "iso8859-10", "LATIN7": "iso8859-13", "LATIN8": "iso8859-14", "LATIN9": "iso8859-15",
    "LATIN10": "iso8859-16", "ISO_8859_5": "iso8859-5", "ISO_8859_6": "iso8859-6", "ISO_8859_7": "iso8859-7",
    "ISO_8859_8": "iso8859-8", "KOI8R": "koi8-r", "KOI8U": "koi8-u", "WIN866": "cp866", "WIN874": "cp874",
    "WIN1250": "cp1250", "WIN1251": "cp1251", "WIN1252": "cp1252", "WIN1253": "cp1253", "WIN1254": "cp1254",
    "WIN1255": "cp1255", "WIN1256": "cp1256", "WIN1257": "cp1257", "WIN1258": "cp1258",
}  # fmt: skip
_BY_SERVER: Final = (
    Encoding("EUC_CN", "gb2312"),
    Encoding("EUC_JP", "euc_jp", _EUC_JP, dict(zip("〜‖−¢£¬¦", "～∥－￠￡￢￤", strict=True))),
    Encoding("EUC_JIS_2004", "euc_jis_2004", other=dict(zip("￣―￥⦅⦆", "‾—¥｟｠", strict=True))),
    # Python's euc_kr would decode some sequences of four characters as one syllable, which the server does not do.
    Encoding("EUC_KR", "cp949", {b"\xa2\xe8": "㉾"}),
)

UTF8: Final = Encoding("UTF8", "utf-8")
_BY_NAME: Final = {
    one.name: one
    for one in (UTF8, Encoding(_SQL_ASCII, "utf-8"), *_BY_SERVER, *(Encoding(*pair) for pair in _SINGLE_BYTE.items()))
}
