"""Text for terminals."""

import re

# Control characters, and marks that change the direction of text or end a line.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    r"""Return `text` with control characters as escapes such as \x1b, so that a name cannot control the terminal."""
    return _CONTROLS.sub(lambda match: _escape(ord(match[0])), text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def to_utf8(text: str) -> str:
    r"""Return text with bytes that are not UTF-8, as in some file names, written as escapes such as \xff."""
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")
