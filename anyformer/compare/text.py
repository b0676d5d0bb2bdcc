"""Numbers and names as people read them."""

import math
import unicodedata

DASH, MINUS, TIMES = "\u2013", "\u2212", "\u00d7"


def plain(text: str) -> str:
    """The text on one line, without control or direction marks, which could rewrite a terminal or break an SVG."""
    kept = (" " if unicodedata.category(mark) in ("Cc", "Cf", "Cs", "Zl", "Zp") else mark for mark in text)
    return " ".join("".join(kept).split())


def shorten(text: str, width: int) -> str:
    """At most ``width`` characters, cut in the middle: both ends of a spec tell methods apart."""
    if len(text) <= width:
        return text
    left = width // 2
    return text[:left] + "…" + text[len(text) - (width - 1 - left) :]


def number(value: float | int | None, digits: int = 4) -> str:
    """Significant digits without an exponent for everyday sizes; a dash for None, ``NaN`` spelled out."""
    if value is None:
        return DASH
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else MINUS + "∞"
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}".replace("-", MINUS)
    decimals = digits - 1 - (math.floor(math.log10(abs(value))) if value else 0)
    return f"{value:.{max(decimals, 0)}f}".replace("-", MINUS)


def signed(value: float | int, digits: int = 3) -> str:
    """A difference, always with its sign."""
    return ("+" if value > 0 else "") + number(value, digits)


def count(value: float | int | None) -> str:
    """Counts in thousands, millions, billions: ``116k``."""
    return _scaled(value, 1000, ("", "k", "M", "B", "T"))


def size(value: float | int | None) -> str:
    """Bytes in binary units: ``1.3 GiB``."""
    return _scaled(value, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def duration(seconds: float | int | None) -> str:
    """Seconds in the unit that reads best."""
    if seconds is None or not math.isfinite(seconds):
        return number(seconds)
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{number(seconds * factor, 3)} {unit}"
    return f"{number(seconds * 1e6, 3)} µs"


def listing(names: list[str], most: int = 6) -> str:
    """Names joined by commas, the rest counted."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _scaled(value: float | int | None, base: int, units: tuple[str, ...]) -> str:
    if value is None or not math.isfinite(value):
        return number(value)
    unit = 0
    while abs(value) >= base and unit < len(units) - 1:
        value, unit = value / base, unit + 1
    return (f"{value:.0f}" if unit == 0 or abs(value) >= 100 else f"{value:.3g}") + units[unit]
