"""Images with their boxes: grids of what the network sees, should find and found; single ones of a detection."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from utils.ops.boxes import xywhn2xyxy, xyxy2xywh
from utils.plots.captions import Captions
from utils.plots.fonts import drawable, font
from utils.plots.style import class_colour
from utils.system.files import atomic_write, printable

BACKGROUND = "#202020"
GAP = 4  # pixels between two cells
SHOWN_CONFIDENCE = 0.25  # detections at or below it are not drawn
MIN_CELL = 256  # images with fewer pixels a side are enlarged to at least this, or the text would cover them
LONGEST_FILE_NAME = 40
MOST_CELLS = 16  # of a grid


def class_name(names, index):
    """The name of class `index` in a list, a dict or None, on one line; its number where there is none."""
    index = int(index)
    if isinstance(names, dict):
        return printable(names.get(index, index))
    return printable(names[index]) if names is not None and 0 <= index < len(names) else str(index)


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
    `max_size` is the longest side of a cell in pixels. Returns the grid [height x width x 3, RGB, uint8]. Raises
    ValueError without images, and for a suffix of no image format.
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
        file = "" if paths is None else Path(paths[index]).name[:LONGEST_FILE_NAME]
        _draw_targets(draw, targets[targets[:, 0] == index], names, file)
        column, row = divmod(index, rows)
        grid.paste(cell, (GAP + column * (width + GAP), GAP + row * (height + GAP)))
    if fname is not None:
        Path(fname).parent.mkdir(parents=True, exist_ok=True)
        kind = Image.registered_extensions().get(Path(fname).suffix.lower())
        if kind is None:
            raise ValueError(f"{printable(fname)} has the suffix of no image format; name a .jpg or .png")
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
    """A copy of `image` [h x w x 3, uint8, BGR] with its boxes, the best one on top, and a `caption` in a corner.

    Boxes get their text where it hides no other object, the best ones first; all lie over the text.
    detections [k x 6: x1, y1, x2, y2, confidence, class] in pixels of the image, best first.
    """
    picture = Image.fromarray(np.ascontiguousarray(image[..., ::-1]))
    draw = ImageDraw.Draw(picture)
    line = style.line_width or _line_width(*picture.size)
    detections, texts = _array(detections).reshape(-1, 6), []
    for *_, confidence, class_id in detections.tolist() if style.with_names else ():
        texts.append(class_name(names, class_id) + (f" {confidence:.2f}" if style.with_confidence else ""))
    _draw_objects(draw, detections[:, :4], detections[:, 5], texts, line, caption)
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


def _draw_targets(draw, rows, names, caption):
    """Boxes and class names of one image; rows [n x 6 or 7] as in plot_images. Non-finite boxes are left out."""
    width, height = draw.im.size
    rows = rows[np.isfinite(rows[:, :6]).all(axis=1)]
    if rows.shape[1] > 6:
        rows = rows[np.argsort(-rows[:, 6], kind="stable")]
    texts = [class_name(names, row[1]) + (f" {row[6]:.2f}" if len(row) > 6 else "") for row in rows]
    boxes = xywhn2xyxy(rows[:, 2:6], width, height)
    _draw_objects(draw, boxes, rows[:, 1], texts, _line_width(width, height), caption)


def _draw_objects(draw, boxes_xyxy, class_ids, texts, line, caption):
    """Text where there is room for it, the first boxes first; then the boxes over it, the first one on top."""
    width, height = draw.im.size
    captions, size = Captions(width, height, boxes_xyxy), max(10, round(max(width, height) / 40))
    if caption:
        _draw_text(draw, caption, size, BACKGROUND, captions.in_a_corner)
    for index, (text, class_id) in enumerate(zip(texts, class_ids, strict=False)):
        _draw_text(draw, text, size, class_colour(class_id), partial(captions.beside, index))
    for box, class_id in reversed(list(zip(captions.boxes, class_ids, strict=True))):
        draw.rectangle(tuple(box), outline=class_colour(class_id), width=line)


def _draw_text(draw, text, size, fill, find_place):
    """White or black text, whichever reads better, on a filled label where `find_place(width, height)` wants it."""
    text = drawable(text)
    letters = font(text, size)
    left, top, right, bottom = letters.getbbox(text)
    label_width, label_height = right - left + 4, bottom - top + 4
    place = find_place(label_width, label_height)
    if place is None:
        return
    x, y = place
    draw.rectangle((x, y, x + label_width, y + label_height), fill=fill)
    red, green, blue = (int(fill[k : k + 2], 16) for k in (1, 3, 5))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140
    draw.text((x + 2 - left, y + 2 - top), text, font=letters, fill="white" if dark else "black")
