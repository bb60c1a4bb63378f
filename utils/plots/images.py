"""Images with their boxes: grids of what the network sees, should find and found; single ones of a detection."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from utils.ops.boxes import xywhn2xyxy, xyxy2xywh
from utils.plots.style import PALETTE
from utils.system.files import atomic_write

BACKGROUND = "#202020"
GAP = 4  # pixels between two cells
SHOWN_CONFIDENCE = 0.25  # detections at or below it are not drawn
MIN_CELL = 256  # images with fewer pixels a side are enlarged to at least this, or the text would cover them
LONGEST_FILE_NAME = 40
MOST_CELLS = 16  # of a grid


def class_name(names, index):
    """The name of class `index` in a list, a dict or None, as it can be drawn; its number where there is none."""
    index = int(index)
    if isinstance(names, dict):
        return drawable(str(names.get(index, index)))
    return drawable(str(names[index])) if names is not None and 0 <= index < len(names) else str(index)


@lru_cache(maxsize=10_000)
def drawable(text):
    """`text` on one line; letters that the font lacks, as \\u540d, so that names stay different from each other."""
    known = _letters()
    return "".join(c if ord(c) in known and c.isprintable() else ascii(c)[1:-1] for c in text)


def plot_images(
    images: torch.Tensor | np.ndarray,
    targets: torch.Tensor | np.ndarray,
    paths: Sequence[str | Path] | None = None,
    fname: str | Path | None = "images.jpg",
    names: Sequence[str] | dict | None = None,
    max_size: int = 640,
    max_subplots: int = MOST_CELLS,
) -> np.ndarray:
    """Draw a batch as a grid (cells column by column), write it to `fname` unless that is None, and return it.

    images [B x 3 x H x W, RGB, uint8 0..255 or float 0..1], array or tensor on any device; it is only read.
    targets [n x 6: image, class, x, y, w, h normalised], or [n x 7] with a confidence: then rows above 0.25 are drawn.
    `max_size` is the longest side of a cell in pixels. Returns the grid [height x width x 3, RGB, uint8].
    """
    images, targets = _array(images[:max_subplots]), _array(targets)
    if not len(images):
        raise ValueError(f"{fname}: there is no image to draw")
    if targets.shape[1:] == (7,):
        targets = targets[targets[:, 6] > SHOWN_CONFIDENCE]
    width, height = _cell_size(images.shape[2], images.shape[3], max_size)
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)

    grid = Image.new("RGB", (columns * (width + GAP) + GAP, rows * (height + GAP) + GAP), BACKGROUND)
    for index, image in enumerate(images):
        cell = _to_pil(image).resize((width, height), Image.Resampling.BILINEAR)
        draw = ImageDraw.Draw(cell)
        _draw_boxes(draw, targets[targets[:, 0] == index], names)
        if paths is not None:
            _draw_text(draw, (0, height), drawable(Path(paths[index]).name)[:LONGEST_FILE_NAME], BACKGROUND)
        column, row = divmod(index, rows)
        grid.paste(cell, (GAP + column * (width + GAP), GAP + row * (height + GAP)))
    if fname is not None:
        Path(fname).parent.mkdir(parents=True, exist_ok=True)
        kind = Image.registered_extensions()[Path(fname).suffix.lower()]
        with atomic_write(fname) as file:
            grid.save(file, format=kind, quality=92)
    return np.asarray(grid)


def output_to_targets(output: Sequence[torch.Tensor], width: int, height: int) -> np.ndarray:
    """Detections of a batch as rows for plot_images.

    output, list over images of [k x 6: x1, y1, x2, y2, confidence, class] in pixels of a `width` x `height` input
    -> [n x 7: image, class, x, y, w, h normalised, confidence] float64
    """
    rows = [np.zeros((0, 7))]
    for index, detections in enumerate(output):
        detections = _array(detections).astype(np.float64)
        boxes_xywhn = xyxy2xywh(detections[:, :4]) / (width, height, width, height)
        image_column = np.full((len(detections), 1), float(index))
        rows.append(np.concatenate((image_column, detections[:, 5:6], boxes_xywhn, detections[:, 4:5]), axis=1))
    return np.concatenate(rows)


@dataclass(frozen=True)
class BoxStyle:
    """How `draw_detections` draws: line width in pixels (0: by the size of the image), names, confidences."""

    line_width: int = 0
    with_names: bool = True
    with_confidence: bool = True


def draw_detections(
    image: np.ndarray, detections: torch.Tensor, names: Sequence[str] | dict | None, style: BoxStyle = BoxStyle(),
    caption: str = "",
) -> np.ndarray:  # fmt: skip
    """A copy of `image` [h x w x 3, uint8, BGR] with its boxes, the best one on top, and a `caption` in its corner.

    detections [k x 6: x1, y1, x2, y2, confidence, class] in pixels of the image, best first.
    """
    picture = Image.fromarray(np.ascontiguousarray(image[..., ::-1]))
    draw = ImageDraw.Draw(picture)
    line = style.line_width or _line_width(*picture.size)
    for *box_xyxy, confidence, class_id in reversed(_array(detections).tolist()):
        text = class_name(names, class_id) if style.with_names else ""
        text += f" {confidence:.2f}" if style.with_names and style.with_confidence else ""
        _draw_box(draw, box_xyxy, class_id, text, line)
    if caption:
        _draw_text(draw, (0, 0), drawable(caption), BACKGROUND)
    return np.ascontiguousarray(np.asarray(picture)[..., ::-1])


def _line_width(width, height):
    return max(2, round((width + height) / 400))


def _array(values):
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def _cell_size(height, width, max_size):
    """Width and height of a cell: the image's, enlarged by a whole factor or reduced to `max_size`."""
    longest = max(height, width)
    factor = max(1, math.ceil(MIN_CELL / longest))
    factor = min(factor, max_size / longest)
    return max(1, round(width * factor)), max(1, round(height * factor))


def _to_pil(image):
    """[3 x H x W, uint8 or float 0..1] as a Pillow image; the input is copied, never scaled in place."""
    if image.dtype != np.uint8:
        image = np.nan_to_num(image.astype(np.float32) * 255).round().clip(0, 255).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))


def _draw_boxes(draw, rows, names):
    """Boxes and class names of one image; rows [n x 6 or 7] as in plot_images. Non-finite boxes are left out."""
    width, height = draw.im.size
    line = _line_width(width, height)
    rows = rows[np.isfinite(rows[:, :6]).all(axis=1)]
    for row, box_xyxy in zip(rows, xywhn2xyxy(rows[:, 2:6], width, height), strict=True):
        confidence = f" {row[6]:.2f}" if len(row) > 6 else ""
        _draw_box(draw, box_xyxy, row[1], class_name(names, row[1]) + confidence, line)


def _draw_box(draw, box_xyxy, class_id, text, line):
    """A box in the colour of its class, with `text` above it, if there is any."""
    x1, y1, x2, y2 = box_xyxy
    colour = PALETTE[int(class_id) % len(PALETTE)]
    draw.rectangle((min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)), outline=colour, width=line)
    if text:
        _draw_text(draw, (x1, y1), text, colour, above=True)


def _draw_text(draw, corner, text, fill, above=False):
    """White or black text, whichever reads better, on a filled label at `corner`, moved to lie inside the image."""
    width, height = draw.im.size
    font = _font(max(10, round(max(width, height) / 32)))
    left, top, right, bottom = font.getbbox(text)
    label_width, label_height = right - left + 4, bottom - top + 4
    x = min(max(0, corner[0]), max(0, width - label_width))
    y = min(max(0, corner[1] - (label_height if above else 0)), max(0, height - label_height))
    draw.rectangle((x, y, x + label_width, y + label_height), fill=fill)
    red, green, blue = (int(fill[k : k + 2], 16) for k in (1, 3, 5))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140
    draw.text((x + 2 - left, y + 2 - top), text, font=font, fill="white" if dark else "black")


@lru_cache(maxsize=8)
def _font(size):
    return ImageFont.truetype(_font_file(), size)


@lru_cache(maxsize=1)
def _letters():
    """Code points of all letters of the font."""
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(_font_file()).get_charmap())


def _font_file():
    from matplotlib import get_data_path  # its DejaVu font comes with every installation and reads beyond ASCII

    return str(Path(get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf")
