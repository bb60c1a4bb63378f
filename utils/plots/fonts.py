"""Fonts that have the letters of a text: matplotlib's DejaVu, else one of this machine, as for Chinese names."""

import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import Event

from PIL import ImageFont

logger = logging.getLogger(__name__)

# Files that are likely to have them come first: looking into all fonts of a machine can take a second.
LIKELY = re.compile(r"cjk|noto|han|wqy|zenhei|ukai|uming|msjh|jhenghei|mingliu|pingfang|hei|song|hira|malgun|nanum"
                    r"|gothic|mincho|ipa|fallback|unifont|unicode", re.IGNORECASE)  # fmt: skip

_SAID = Event()


def drawable(text: str) -> str:
    """`text` on one line; letters that no font here has, as \\u540d, so that names stay different from each other."""
    known = _letters(font_file(text))
    if any(letter.isprintable() and ord(letter) not in known for letter in text):
        _say_what_is_missing(text)
    return "".join(c if ord(c) in known and c.isprintable() else ascii(c)[1:-1] for c in text)


def font(text: str, size: int) -> ImageFont.FreeTypeFont:
    """Pillow's font for a text, `size` in pixels."""
    return _font(font_file(text), size)


@lru_cache(maxsize=10_000)
def font_file(text: str) -> str:
    """The font that has all letters of `text`; matplotlib's own, which comes with every installation, if none has."""
    missing = {ord(letter) for letter in text if letter.isprintable()} - _letters(own_font())
    if not missing:
        return own_font()
    return next((file for file in system_fonts() if missing <= _letters(file)), own_font())


@lru_cache(maxsize=1)
def own_font() -> str:
    from matplotlib import get_data_path

    return str(Path(get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf")


def system_fonts() -> Iterator[str]:
    """Font files of this machine, the likely ones first."""
    from matplotlib.font_manager import findSystemFonts

    yield from sorted(findSystemFonts(), key=lambda file: (not LIKELY.search(Path(file).name), file))


def use_fonts(figure) -> None:
    """Give every text of a figure of matplotlib the font that has its letters."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        file = font_file(text.get_text())
        if file != own_font():
            properties = text.get_fontproperties().copy()
            properties.set_file(file)
            text.set_fontproperties(properties)


def _say_what_is_missing(text):
    """Once in a process, whatever texts follow."""
    if _SAID.is_set():
        return
    _SAID.set()
    logger.warning(
        "no font on this machine has all letters of %s: names are drawn with their codes; install a font that has them "
        "(Debian, Ubuntu: apt install fonts-noto-cjk)", text,
    )  # fmt: skip


@lru_cache(maxsize=1000)
def _letters(file):
    """Code points of all letters of a font; none of a file that cannot be read."""
    from matplotlib.ft2font import FT2Font

    with suppress(RuntimeError, OSError, ValueError):
        return frozenset(FT2Font(file).get_charmap())
    return frozenset()


@lru_cache(maxsize=32)
def _font(file, size):
    return ImageFont.truetype(file, size)
