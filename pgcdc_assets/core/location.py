"""Places as values: where a file or folder of the lake is, on any store.

A local place is an absolute path. Any other place is a URL, whose scheme says which store holds it. This module never
touches a disk: :mod:`pgcdc_assets.store` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Final, Self

LOCAL: Final = ""
"""The scheme of places on this machine's file system."""
_MARK: Final = "://"


@dataclass(frozen=True, order=True)
class Location:
    """One place. Two places are equal if their texts are equal, and places sort as their texts."""

    text: str
    """``/lake/public/t``, or ``scheme://store/lake/public/t``; without a slash at its end."""

    @classmethod
    def of(cls, place: str | PathLike[str] | Self) -> Self:
        """From a path, relative to the working directory if it is relative, or from a URL."""
        if isinstance(place, cls):
            return place
        text = str(place)
        # ``..`` stays, because the file system resolves it after following links: the text alone could give another
        # place.
        return cls(text.rstrip("/") if _MARK in text else str(Path(text).absolute()))

    @property
    def scheme(self) -> str:
        """The URL's scheme; ``LOCAL`` for a path."""
        return LOCAL if self.text.startswith("/") else self.text.partition(_MARK)[0]

    @property
    def name(self) -> str:
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        return Location(self.text.rpartition("/")[0] or "/")

    @property
    def uri(self) -> str:
        """The place for other programs, as a URI."""
        return PurePosixPath(self.text).as_uri() if self.scheme == LOCAL else self.text

    @property
    def for_hadoop(self) -> str:
        """The place for Spark's readers. Hadoop's scheme for S3 is ``s3a``."""
        return self.text.replace("s3://", "s3a://", 1) if self.scheme == "s3" else self.text

    def __truediv__(self, name: str) -> Location:
        return Location(f"{self.text.rstrip('/')}/{name}")

    def with_name(self, name: str) -> Location:
        """The place beside this one."""
        return self.parent / name

    def up_to(self, root: Location) -> list[Location]:
        """This folder and its parents, up to the folder that holds ``root``. Settling all of them makes a new folder
        durable."""
        found = [self]
        while found[-1] != root.parent and found[-1] != found[-1].parent:
            found.append(found[-1].parent)
        return found

    def __str__(self) -> str:
        return self.text
