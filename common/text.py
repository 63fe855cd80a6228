"""Text that any stream takes."""

from __future__ import annotations


def utf8(text: str) -> str:
    r"""Writes the bytes of a file name that are no UTF-8 (in Python, lone surrogates) as \udc.."""
    return text.encode("utf-8", "backslashreplace").decode()


def clean(text: str) -> str:
    r"""Writes control characters as \x.. too: a terminal would obey them."""
    text = utf8(text)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
