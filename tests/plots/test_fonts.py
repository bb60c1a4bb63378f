"""Letters that matplotlib's own font lacks: drawn with a font of the machine, else by their codes, said once."""

import warnings

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen

from utils.plots import fonts
from utils.plots.images import plot_images
from utils.plots.style import new_figure, save_figure


def make_font(path, letters):
    """A font in which each of `letters` is a full square."""
    names = {ord(letter): f"u{ord(letter)}" for letter in letters}
    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    for point in ((0, 900), (900, 900), (900, 0)):
        pen.lineTo(point)
    pen.closePath()
    square = pen.glyph()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", *names.values()])
    builder.setupCharacterMap(names)
    builder.setupGlyf(dict.fromkeys([".notdef", *names.values()], square))
    builder.setupHorizontalMetrics(dict.fromkeys([".notdef", *names.values()], (1000, 0)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": path.stem, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)
    return str(path)


@pytest.fixture
def machine(monkeypatch):
    """Sets the fonts of the machine."""
    fonts.font_file.cache_clear()
    fonts._SAID.clear()
    yield lambda *files: monkeypatch.setattr(fonts, "system_fonts", lambda: iter(files))
    fonts.font_file.cache_clear()
    fonts._SAID.clear()


def test_the_first_font_that_has_all_letters(machine, tmp_path):
    few, all_of_them = (
        make_font(tmp_path / name, text) for name, text in (("few.ttf", "紅"), ("all.ttf", "紅血球 0.9"))
    )
    (tmp_path / "broken.ttf").write_text("no font")
    machine(str(tmp_path / "broken.ttf"), few, all_of_them)
    assert fonts.font_file("RBC 0.9é") == fonts.own_font()
    assert (fonts.font_file("紅"), fonts.font_file("紅血球 0.9")) == (few, all_of_them)
    assert fonts.drawable("紅血球") == "紅血球" and fonts.drawable("RBC\n") == "RBC\\n"


def test_without_one_names_stay_different_and_it_is_said_once(machine, tmp_path, caplog):
    machine()
    assert [fonts.drawable(name) for name in ("紅", "白", "a\nb")] == ["\\u7d05", "\\u767d", "a\\nb"]
    (said,) = caplog.messages
    assert "letters of 紅:" in said and "apt install fonts-noto-cjk" in said


def test_images_and_plots_use_it(machine, tmp_path):
    """The squares of the font are on the image, and matplotlib misses no glyph."""
    machine(make_font(tmp_path / "cjk.ttf", "紅血球"))
    images, target = np.zeros((1, 3, 320, 320), np.uint8), np.array([(0, 0, 0.5, 0.5, 0.5, 0.5)])
    drawn = plot_images(images, target, fname=None, names=["紅血球"])
    assert (drawn == 255).all(2).sum() > 3 * 6 * 6, "white on blue"
    figure, (ax,) = new_figure()
    ax.set_title("紅血球", fontsize=17)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_figure(figure, tmp_path / "plot.png")
    assert ax.title.get_fontsize() == 17


def test_fonts_of_this_machine_are_found_likely_ones_first(monkeypatch):
    files = ["/z/Arial.ttf", "/b/NotoSansCJK-Regular.ttc", "/a/Comic.ttf", "/a/wqy-microhei.ttc"]
    monkeypatch.setattr("matplotlib.font_manager.findSystemFonts", lambda: files)
    assert list(fonts.system_fonts()) == [files[1 + 2], files[1], files[2], files[0]]
