"""Paths and URIs of sources and tables: checked, and made absolute against the spec's folder."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

__all__ = ["SCHEMES", "absolute_location", "is_inside", "same_place"]

SCHEMES = ("s3", "gs", "az", "abfs", "abfss", "file")
_OTHER_WORDS = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "azure": "az", "wasb": "az", "wasbs": "az", "adl": "abfs"}
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
_GLOB = re.compile(r"[*?\[]")


def absolute_location(text: str, folder: str) -> str:
    """Return a local path made absolute against `folder`; a URI is only checked.

    Raises:
        ValueError: an unknown scheme, credentials in the URI, or nothing named.
    """
    if not text.strip():
        raise ValueError("must not be empty")
    if "\0" in text or "\n" in text:
        raise ValueError("must not hold line ends or NUL characters")
    match = _SCHEME.match(text)
    if match is None:
        return os.path.abspath(os.path.join(folder, os.path.expanduser(text)))
    _check_uri(text, match.group(1))
    return text


def _check_uri(text: str, scheme: str) -> None:
    if scheme not in SCHEMES:
        word = _OTHER_WORDS.get(scheme.lower(), scheme.lower())
        known = ", ".join(f"{s}://" for s in SCHEMES)
        raise ValueError(
            f'unknown scheme "{scheme}://" ' + (f'(write "{word}://")' if word in SCHEMES else f"(known: {known})")
        )
    authority = text[len(scheme) + 3 :].split("/", 1)[0]
    if scheme == "file":
        if authority not in ("", "localhost"):
            raise ValueError('a "file://" URI needs an absolute path: file:///folder')
    elif not authority:
        raise ValueError(f'"{scheme}://" is not followed by a bucket or container')
    elif ":" in authority.rpartition("@")[0]:
        raise ValueError("credentials do not belong in a URI; put them under storage_options")


def _plain(location: str) -> str:
    """Return the location in one spelling: no `file://`, no trailing or doubled slash, up to the first glob."""
    match = _GLOB.search(location)
    if match is not None:
        location = location[: match.start()].rpartition("/")[0] or "/"
    scheme = _SCHEME.match(location)
    if scheme is not None and scheme.group(1) != "file":
        return re.sub(r"(?<!:)/+", "/", location).rstrip("/")
    path = urlsplit(location).path if scheme is not None else location
    return os.path.normpath(path)


def same_place(a: str, b: str) -> bool:
    """Whether two absolute locations are spellings of the same location."""
    return _plain(a) == _plain(b)


def is_inside(inner: str, outer: str) -> bool:
    """Whether an absolute location equals or lies below another one. Only a glob with `**` reaches below."""
    if _GLOB.search(outer) and "**" not in outer:
        return False
    below, above = _plain(inner), _plain(outer)
    return below == above or below.startswith(above.rstrip("/") + "/")
