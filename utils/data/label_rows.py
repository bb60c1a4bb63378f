"""The text of a label file, one object a line: `class x y w h` or `class x1 y1 x2 y2 x3 y3 ...`, in fractions of 1.

Every row is what its own length says: 5 numbers are a box, class plus three or more points are a polygon, 6 numbers are
a box with a confidence that is ignored. A row that cannot be used is dropped alone, with its file, line and reason.
"""

import math
import re
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np

from utils.ops.boxes import segments2boxes
from utils.system.files import printable, split_lines

TOLERANCE = 0.01  # coordinates this far outside 0..1 are clipped, others refuse the row
CLASS_LIMIT = 2**24  # float32 holds whole numbers exactly below this
NO_POINTS = np.zeros((0, 2), np.float32)  # the segment of a box row

ROW_DROPPED = "row dropped"
ROW_REPAIRED = "row repaired"
ROW_KEPT = "row kept"
MAX_EXAMPLES = 5

DECIMAL_COMMA = re.compile(r"-?\d+,\d+")


class Note(NamedTuple):
    """One thing that was found: what was done, why, and where (`file:line detail`)."""

    effect: str
    reason: str
    place: str


class Finding(NamedTuple):
    """All notes of one effect and reason: how many, and the first few places."""

    effect: str
    reason: str
    times: int
    places: list

    def __str__(self):
        rest = f", and {self.times - len(self.places)} more" if self.times > len(self.places) else ""
        return f"{self.effect} ({self.times}x): {self.reason}: {', '.join(self.places)}{rest}"


def gather(notes):
    """Notes, grouped by effect and reason in order of appearance, as a list of Finding."""
    counts, places = Counter(), defaultdict(list)
    for note in notes:
        key = (note.effect, note.reason)
        counts[key] += 1
        if counts[key] <= MAX_EXAMPLES:
            places[key].append(note.place)
    return [Finding(*key, count, places[key]) for key, count in counts.items()]


def parse_label_text(text, file=""):
    """Objects of one label file.

    Returns (rows [n x 5, float32: class, x, y, w, h], segments, notes). `segments` is [] when the file has no polygon,
    else one float32 array [m x 2] a row, [0 x 2] for a box row. `notes` tell of every row that was dropped or changed;
    `file` names the file in them.
    """
    rows, segments, notes, seen = [], [], [], set()
    for number, line in enumerate(split_lines(text.replace("\ufeff", "")), 1):
        place = f"{printable(file)}:{number}"
        try:
            tokens = _tokens(line)
            if not tokens:
                continue
            row, points, remarks = _parse_row(tokens)
        except ValueError as error:
            reason, *detail = error.args
            notes.append(Note(ROW_DROPPED, reason, " ".join((place, *map(printable, detail)))))
            continue
        key = row.tobytes()
        if key in seen:
            notes.append(Note(ROW_DROPPED, "repeats an earlier row of the file", place))
            continue
        seen.add(key)
        notes.extend(Note(effect, reason, place) for effect, reason in remarks)
        rows.append(row)
        segments.append(points)
    if not any(map(len, segments)):
        segments = []
    return np.array(rows, np.float32).reshape(-1, 5), segments, notes


def _tokens(line):
    """The fields of a line without its comment; separators are blanks, tabs and commas."""
    fields = line.partition("#")[0].split()
    if not any("," in field for field in fields):
        return fields
    if len(fields) > 1 and any(DECIMAL_COMMA.fullmatch(field) for field in fields):
        raise ValueError("decimal comma (write 0.5, not 0,5)", line.strip()[:40])
    return " ".join(fields).replace(",", " ").split()


def _parse_row(tokens):
    """(row [5, float32], points [m x 2, float32], remarks [(effect, reason), ...]); ValueError(reason, detail)."""
    class_id, *coordinates = _numbers(tokens)
    if not class_id.is_integer():
        raise ValueError("class id is not a whole number", tokens[0])
    if abs(class_id) >= CLASS_LIMIT:
        raise ValueError(f"class id is beyond {CLASS_LIMIT}", tokens[0])
    if len(coordinates) < 4:
        raise ValueError("fewer than 5 numbers", f"({len(tokens)})")
    remarks = []
    if len(coordinates) == 5:
        remarks.append((ROW_REPAIRED, "sixth column (a confidence) ignored"))
        coordinates = coordinates[:4]
    if len(coordinates) % 2:
        raise ValueError("polygon with an odd count of coordinates", f"({len(coordinates)})")
    values = np.array(coordinates, np.float32)
    if _clip(values):
        remarks.append((ROW_REPAIRED, f"coordinates less than {TOLERANCE:.0%} outside 0..1 were clipped"))
    if len(values) == 4:
        box, points = values, NO_POINTS
    else:
        points = values.reshape(-1, 2)
        box = segments2boxes([points])[0]
    if not box[2:].all():
        # stock behaviour: such a box stays; the loss and the augmentation pass over it
        remarks.append((ROW_KEPT, "box of zero width or height"))
    return np.array([class_id + 0.0, *box], np.float32), points, remarks  # + 0.0 turns -0 into 0


def _numbers(tokens):
    """The tokens as numbers, read as every tool does: Python alone takes 1_0 for 10, and the digits of any script."""
    numbers = []
    for token in tokens:
        try:
            if "_" in token or not token.isascii():
                raise ValueError
            numbers.append(float(token))
        except ValueError:
            reason = "not a number" if numbers else "class is text, the number of the class is needed"
            raise ValueError(reason, repr(token[:20])) from None
    if not all(map(math.isfinite, numbers)):
        raise ValueError("NaN or infinite number")
    return numbers


def _clip(values):
    """Clip `values` to 0..1 in place; whether anything changed. ValueError if a value is too far outside."""
    lowest, highest = values.min(), values.max()
    if lowest >= 0 and highest <= 1:
        return False
    worst = lowest if -lowest > highest - 1 else highest
    if max(-lowest, highest - 1) > TOLERANCE + 1e-6:  # the margin is for float32
        hint = " (pixels? fractions of width and height are needed)" if highest > 2 else ""
        raise ValueError(f"coordinate more than {TOLERANCE:.0%} outside 0..1{hint}", f"{worst:g}")
    values.clip(0, 1, out=values)
    return True
