"""Spans of time in words."""

from typing import Final

_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))


def span_text(seconds: float) -> str:
    """A span of time in its two largest units: "3 d 4 h", "2 min 5 s", "1.25 s", "0.4 ms", "0 s"."""
    if seconds < 0:
        return f"−{span_text(-seconds)}"
    for (size, unit), (less, smaller) in zip(_UNITS, (*_UNITS[1:], (1, "s")), strict=True):
        whole = round(seconds / less) * less
        if whole >= size:
            rest = whole % size // less
            return f"{whole // size:,} {unit}" + (f" {rest} {smaller}" if rest else "")
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1000 * seconds:.3g} ms" if seconds else "0 s"
