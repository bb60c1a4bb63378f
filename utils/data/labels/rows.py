"""The text of a label file, one object a line: `class x y w h` or `class x1 y1 x2 y2 x3 y3 ...`, in fractions of 1.

5 numbers are a box, class plus three or more points are a polygon, 6 numbers are a box with a confidence that is
ignored. The same numbers may also be a box with keypoints, or with further columns. That is not for a row to say, but
for the data set: `kpt_shape` of its data yaml, or columns of whole numbers in all rows of a length (see RowForms,
Columns). A row that cannot be used is dropped alone, with its file, line and reason.
"""

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
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

FEW_COLUMNS = 12  # numbers of a row that may be a box with further columns; longer ones are outlines or poses
MANY_ROWS = 8  # of one length: a column of nothing but 0 and 1, of both, is no coordinate any more

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


class RowForms(NamedTuple):
    """How rows of more than six numbers are read, by their number of numbers."""

    box_only: dict  # length: what is ignored behind the box, in words
    refused: str = ""  # why a row of any other length is dropped; empty: it is a polygon

    @classmethod
    def of_keypoints(cls, keypoints):
        """Of a data set with `keypoints` (number, numbers each), None without any."""
        if keypoints is None:
            return cls({})
        number, each = keypoints
        shape, length = f"kpt_shape [{number}, {each}]", 5 + number * each
        return cls(
            {length: f"keypoints ignored, the box counts ({shape})",
             length + 1: f"keypoints and a confidence ignored, the box counts ({shape})"},
            f"{shape} of the data yaml asks for 5 numbers or {length}; remove kpt_shape if these are polygons",
        )  # fmt: skip


@dataclass
class Columns:
    """What the columns behind the box, from number 5 on, have in common in all rows of one length."""

    rows: int = 0
    whole: set = field(default_factory=set)  # columns of whole numbers
    zero: set = field(default_factory=set)  # those of `whole` with a 0
    above: dict = field(default_factory=lambda: {0: set(), 1: set(), 2: set()})  # with a number above 0, 1 and 2
    negative: set = field(default_factory=set)  # with a number below 0, such as -1 where a track has no id
    no_box: int = 0  # rows that begin with a flat box, or with one that leaves the image, as outlines may

    def add(self, numbers):
        if not all(-TOLERANCE <= number <= 1 + TOLERANCE for number in numbers[1:5]):
            return  # neither: the row is refused
        self.rows += 1
        x, y, w, h = numbers[1:5]
        self.no_box += (
            w <= 0
            or h <= 0
            or not all(size / 2 - TOLERANCE <= middle <= 1 + TOLERANCE - size / 2 for middle, size in ((x, w), (y, h)))
        )
        if self.rows == 1:
            self.whole = set(range(5, len(numbers)))
        if not self.whole:  # as after the first polygon
            return
        self.whole = {c for c in self.whole if numbers[c].is_integer()}
        self.zero.update(c for c in self.whole if numbers[c] == 0)
        self.negative.update(c for c in self.whole if numbers[c] < 0)
        for limit, columns in self.above.items():
            columns.update(c for c in self.whole if numbers[c] > limit)

    def merge(self, other):
        if not other.rows:  # a file of refused rows tells nothing
            return
        self.whole = self.whole & other.whole if self.rows else set(other.whole)
        self.rows += other.rows
        self.no_box += other.no_box
        self.zero |= other.zero
        self.negative |= other.negative
        for limit, columns in self.above.items():
            columns |= other.above[limit]

    def behind_a_box(self, length):
        """What these rows have behind a box, in words, where they cannot be polygons; else nothing.

        No coordinate is 2 or -1, and a polygon has no odd count of coordinates. Outlines may all touch one border (a
        column of nothing but 1), even have all corners in those of the image; then they do not begin with a box in it.
        """
        large, is_odd = self.whole & (self.above[1] | self.negative), length % 2 == 0
        flags = set(range(7, length, 3)) if length % 3 == 2 else set()
        are_boxes = self.rows >= MANY_ROWS and self.no_box * 10 <= self.rows
        if flags and flags <= self.whole and not flags & self.above[2] and (is_odd or flags & large or are_boxes):
            return f"keypoints with visibility ignored, the box counts (say so: kpt_shape: [{len(flags)}, 3])"
        varied = is_odd or self.whole & self.zero & self.above[0] or len(self.whole) == length - 5
        if length <= FEW_COLUMNS and self.rows > 1 and (large or (self.whole and are_boxes and varied)):
            return f"{length - 5} columns behind the box ignored (track ids or flags, as they hold whole numbers)"
        return ""


def parse_label_text(text, file="", forms=RowForms({}), columns=None):
    """Objects of one label file, its rows read by `forms`; `columns` {length: Columns} takes up what they look like.

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
            numbers = _numbers(tokens)
            if columns is not None and len(numbers) > 6:
                columns.setdefault(len(numbers), Columns()).add(numbers)
            row, points, remarks = _parse_row(numbers, tokens[0], forms)
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


def class_of(line):
    """The class id that a line begins with, as a number; None if it has none."""
    try:
        return _numbers(_tokens(line)[:1])[0]
    except (ValueError, IndexError):
        return None


def _parse_row(numbers, class_text, forms):
    """(row [5, float32], points [m x 2, float32], remarks [(effect, reason), ...]); ValueError(reason, detail)."""
    class_id, *coordinates = numbers
    if not class_id.is_integer():
        raise ValueError("class id is not a whole number", class_text)
    if abs(class_id) >= CLASS_LIMIT:
        raise ValueError(f"class id is beyond {CLASS_LIMIT}", class_text)
    if len(coordinates) < 4:
        raise ValueError("fewer than 5 numbers", f"({len(numbers)})")
    remarks = []
    ignored = forms.box_only.get(len(numbers), "")
    if len(coordinates) == 5 and not ignored:
        what = "a confidence" if 0 <= coordinates[4] <= 1 else "a track id or an angle?"
        ignored = f"sixth column ({what}) ignored"
    if ignored:
        remarks.append((ROW_REPAIRED, ignored))
        coordinates = coordinates[:4]
    elif len(coordinates) > 5 and forms.refused:
        raise ValueError(forms.refused, f"({len(numbers)})")
    if len(coordinates) % 2:
        hint = "; boxes with keypoints? kpt_shape in the data yaml says so" if len(numbers) % 3 == 2 else ""
        raise ValueError(f"polygon with an odd count of coordinates{hint}", f"({len(coordinates)})")
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
