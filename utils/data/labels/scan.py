"""Scan a data set: verify every image, read every label file, count, repair, report, and remember the result."""

import logging
import os
import warnings
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

import numpy as np

from utils.config.data_yaml import repeated_names
from utils.data.images.reading import verify_image
from utils.data.labels.cache import cache_location, load_cache, save_cache, signature
from utils.data.labels.image_list import FILE_IGNORED, LINE_IGNORED, find_images, img2label_paths, labels_next_door
from utils.data.labels.rows import (
    ROW_DROPPED,
    ROW_KEPT,
    ROW_REPAIRED,
    Columns,
    Finding,
    Note,
    RowForms,
    class_of,
    gather,
    parse_label_text,
)  # fmt: skip
from utils.ops.polygons import Polygons
from utils.system.children import forked_pool
from utils.system.cores import usable_cores
from utils.system.files import counted, link_to_nowhere, printable, read_text, split_lines, stand_in
from utils.system.progress import progress

logger = logging.getLogger(__name__)

IMAGE_DROPPED = "image dropped"
NO_LABEL_FILE = "no label file, image is background"
LABEL_ELSEWHERE = "label file elsewhere, image is background"
LABEL_SHARED = "label file shared"
DROPS = (IMAGE_DROPPED, ROW_DROPPED, LINE_IGNORED, FILE_IGNORED, LABEL_ELSEWHERE, LABEL_SHARED)
FOUND, MISSING, EMPTY, DROPPED = "found", "missing", "empty", "dropped"
THREADS, PROCESSES = min(8, usable_cores()), min(32, usable_cores())
MANY_IMAGES = 512


@dataclass
class ScannedDataset:
    """The usable images of a data set with their labels, in the order of the data set; all lists are parallel."""

    img_files: list  # paths as strings
    label_files: list  # where the label file is or would be
    labels: list  # float32 [n x 5: class, x, y, w, h normalised] an image
    segments: list  # an image: Polygons, none at all or a float32 [m x 2] for each row ([0 x 2] for a box row)
    shapes: np.ndarray  # float64 [images x 2: width, height] of the upright images
    counts: dict  # found (empty ones included), missing, empty, dropped, total images; dropped_rows, repaired_rows
    findings: list  # utils.data.labels.rows.Finding: everything that was dropped, repaired or missing
    row_forms: dict = field(default_factory=dict)  # {numbers in a row: what of it is ignored; "" for polygons}

    @property
    def messages(self):
        """One line a finding, for people."""
        return [str(finding) for finding in self.findings]


class _Record(NamedTuple):
    """What the scan of one image gives; `size` is None when the image itself cannot be used."""

    status: str
    size: tuple | None
    rows: np.ndarray
    segments: list
    notes: list
    columns: dict  # utils.data.labels.rows.Columns of the rows of each length above 6


def scan_dataset(path, prefix="", keypoints=None, row_forms=None):
    """Read the data set at `path` (a folder, a list file, or a list of those); `prefix` begins every message.

    `keypoints` (number, numbers each) if the data yaml says that rows are boxes with keypoints, which are ignored.
    `row_forms` are those of the training set, which another part of the data set is read by; without them, by what its
    rows look like, or as it was last read.

    Uses the label cache when nothing has changed since it was written. One line of log sums up, then each reason for a
    repair or a drop has its own warning with the first places. Raises ValueError when there is no usable image.
    """
    img_files, list_notes = find_images(path)
    label_files = img2label_paths(img_files)
    cache_file = cache_location(path, label_files)
    present = signature(img_files, label_files, keypoints)
    fields, row_forms = load_cache(cache_file, present), row_forms or {}
    if fields and any(row_forms.get(length, form) != form for length, form in fields["row_forms"].items()):
        fields = None
    title = f"{prefix}Scanning {printable(os.path.dirname(label_files[0]) or '.')}"
    if fields is None:
        fields = _scan(img_files, label_files, title, RowForms.of_keypoints(keypoints), row_forms)
        if fields["img_files"]:
            save_cache(cache_file, present, fields)
    notes = list_notes + _label_file_notes(fields["img_files"], fields["label_files"], fields["labels"])
    fields["findings"] = gather(notes) + fields["findings"]
    scanned = ScannedDataset(**fields)
    logger.info("%s%s", prefix, describe_scan(scanned))
    for message in scanned.messages:
        logger.warning("%s%s", prefix, message)
    if not scanned.img_files:
        raise ValueError(f"{prefix}none of the {len(img_files)} images can be used. {'. '.join(scanned.messages)}")
    return scanned


def _label_file_notes(img_files, label_files, labels):
    """Notes about label files that are missing, perhaps lie elsewhere, or belong to two images."""
    users = defaultdict(list)
    for img_file, label_file in zip(img_files, label_files, strict=True):
        users[os.path.abspath(label_file)].append(img_file)
    notes = [
        Note(LABEL_SHARED, "images of one name take the same labels, give them names of their own",
             f"{printable(label_file)} ({' and '.join(map(printable, images))})")
        for label_file, images in users.items() if len(images) > 1 and os.path.isfile(label_file)
    ]  # fmt: skip
    found = zip(img_files, label_files, labels, strict=True)
    missing = [(image, label) for image, label, rows in found if not len(rows) and not os.path.exists(label)]
    for (image, label), near in zip(missing, labels_next_door(missing), strict=True):
        place = f"{printable(image)} (looked for {printable(label)}{f', there is {printable(near)}' if near else ''})"
        if near.lower().endswith(".txt"):
            notes.append(Note(LABEL_ELSEWHERE, "its labels lie where nobody looks, move or rename them", place))
        elif near:
            notes.append(Note(LABEL_ELSEWHERE, "its labels have another format, convert them to YOLO's txt", place))
        else:
            notes.append(Note(NO_LABEL_FILE, "labels missing", place))
    return notes


def _scan(img_files, label_files, title, forms, row_forms):
    """The fields of ScannedDataset, by looking at every file."""
    # processes where there are many images, because most of the work is Python's own
    pool = ThreadPoolExecutor(THREADS) if len(img_files) < MANY_IMAGES else forked_pool(PROCESSES)
    with pool, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")  # what is wrong with an image is reported below
        files = zip(img_files, label_files, repeat(forms))
        found = pool.map(_scan_one, files, chunksize=16)
        records = list(progress(found, desc=title, total=len(img_files), unit="img"))
    told, row_findings = ({}, []) if forms.box_only else _judge_rows(records, label_files, row_forms)
    kept = [index for index, record in enumerate(records) if record.status != DROPPED]
    findings = gather(note for record in records for note in record.notes) + row_findings
    return {
        "img_files": [img_files[index] for index in kept],
        "label_files": [label_files[index] for index in kept],
        "labels": [records[index].rows for index in kept],
        "segments": [Polygons.of(records[index].segments) for index in kept],
        "shapes": np.array([records[index].size for index in kept], np.float64).reshape(-1, 2),
        "counts": _counts(Counter(record.status for record in records)) | _row_counts(findings),
        "findings": findings,
        "row_forms": told,
    }


def _judge_rows(records, label_files, row_forms):
    """Read the labels of `records` again where the rows of the whole set tell that they are boxes with more columns.

    `row_forms` tell it of the lengths in them. Returns the row forms of this set, and a list with a finding if its rows
    may be boxes with keypoints that nothing tells from polygons.
    """
    of_set = defaultdict(Columns)
    for record in records:
        for length, own in record.columns.items():
            of_set[length].merge(own)
    judged = {length: columns.behind_a_box(length) for length, columns in of_set.items() if columns.rows}
    told = {length: row_forms.get(length, form) for length, form in judged.items()}
    for index, record in enumerate(records):
        box_only = {length: told.get(length) or own.behind_a_box(length) for length, own in record.columns.items()}
        if any(box_only.values()):
            forms = RowForms({length: ignored for length, ignored in box_only.items() if ignored})
            records[index] = _with_labels(label_files[index], record.size, forms)
    lengths = [length for length, columns in of_set.items() if columns.rows]
    if len(lengths) != 1 or lengths[0] < 11 or lengths[0] % 2 == 0 or told[lengths[0]]:
        return told, []
    length, columns = lengths[0], of_set[lengths[0]]
    count = (length - 5) // 2
    shapes = f"[{count}, 2]" + (f" or [{(length - 5) // 3}, 3]" if length % 3 == 2 else "")
    reason = (
        f"all rows but plain boxes have {length} numbers, read as polygons of {count + 2} points; if they are boxes "
        f"with keypoints, say kpt_shape: {shapes} in the data yaml"
    )
    places = [printable(file) for file, record in zip(label_files, records, strict=True) if record.columns][:1]
    return told, [Finding(ROW_KEPT, reason, columns.rows, places)] if columns.rows > 1 else []


def _scan_one(files):
    """Verify one image and read its labels; files = (image path, label path, RowForms)."""
    img_file, label_file, forms = files
    try:
        size = verify_image(img_file)
    except ValueError as error:
        return _dropped(str(error), img_file)
    return _with_labels(label_file, size, forms)


def _with_labels(label_file, size, forms):
    """The record of an image of this size (width, height)."""
    columns = {}
    try:
        text = read_text(label_file)
    except FileNotFoundError:
        if link := link_to_nowhere(label_file):  # the disk with the labels is not there: that makes no background
            what = "file is a link" if link == label_file else f"folder is a link ({printable(link)})"
            return _dropped(f"label {what} that leads nowhere", label_file)
        return _Record(MISSING, size, np.zeros((0, 5), np.float32), [], [], columns)
    except OSError as error:
        return _dropped(f"label file cannot be read ({error.strerror})", label_file)
    if kind := stand_in(text):
        return _dropped(f"label file is {kind}", label_file)
    rows, segments, notes = parse_label_text(text, label_file, forms, columns)
    if not len(rows) and notes:
        # an image whose objects cannot be read must not be trained as background
        return _dropped("no usable row in its label file", label_file, notes, size, columns)
    return _Record(FOUND if len(rows) else EMPTY, size, rows, segments, notes, columns)


def _dropped(reason, place, notes=(), size=None, columns=None):
    notes = [*notes, Note(IMAGE_DROPPED, reason, printable(place))]
    return _Record(DROPPED, size, np.zeros((0, 5), np.float32), [], notes, columns or {})


def _counts(status):
    return {
        FOUND: status[FOUND] + status[EMPTY],
        MISSING: status[MISSING],
        EMPTY: status[EMPTY],
        DROPPED: status[DROPPED],
        "total": status.total(),
    }


def _row_counts(findings):
    totals = Counter()
    for finding in findings:
        totals[finding.effect] += finding.times
    return {"dropped_rows": totals[ROW_DROPPED], "repaired_rows": totals[ROW_REPAIRED]}


def describe_scan(scanned):
    """One line: how many images and rows of which kind there are; the warnings after it say why."""
    counts, effects = scanned.counts, Counter(finding.effect for finding in scanned.findings)
    parts = [counted(counts["total"], "image"), counted(sum(map(len, scanned.labels)), "object")]
    numbers = {"of them empty": counts[EMPTY], "without a label file": counts[MISSING], "dropped": counts[DROPPED]}
    parts += [f"{number} {words}" for words, number in numbers.items() if number]
    rows = {"repaired": counts["repaired_rows"], "dropped": counts["dropped_rows"]}
    parts += [f"{counted(number, 'row')} {words}" for words, number in rows.items() if number]
    return ", ".join(parts + [effect for effect in (LINE_IGNORED, FILE_IGNORED, LABEL_SHARED) if effects[effect]])


def check_labels(dataset, data, strict=False):
    """Raise ValueError for class ids beyond the data yaml and, with `strict`, for all that the scan passed over.

    With `strict` classes of one name are an error as well.
    """
    check_class_ids(dataset.labels, dataset.label_files, data.nc, data.names)
    if strict:
        check_nothing_dropped(dataset.findings)
        if repeated := repeated_names(data.names):
            raise ValueError(f"--strict-data: the data yaml: {repeated}")


def check_nothing_dropped(findings):
    """Raise ValueError when the scan passed over an image, a row, a list entry, a file or labels (--strict-data)."""
    dropped = [finding for finding in findings if finding.effect in DROPS]
    if dropped:
        raise ValueError(
            f"--strict-data: {'. '.join(map(str, dropped))}. Repair them, or leave the flag out to go on all the same"
        )


def check_has_boxes(labels, label_files, findings=()):
    """Raise ValueError when a training set holds no box at all; the message says what was looked for, and found."""
    if any(map(len, labels)):
        return
    read = [file for file in label_files if os.path.isfile(file)]
    if read:
        problem = f"no boxes in {len(read)} label files, e.g. {printable(read[0])}"
    else:
        problem = (
            f"no label files for {counted(len(label_files), 'image')}, e.g. {printable(label_files[0])} does not exist"
        )
    problem += "".join(f"; {finding}" for finding in findings if finding.effect == LABEL_ELSEWHERE)
    raise ValueError(f"{problem}; --allow-background trains all the same, on background only")


def check_class_ids(labels, label_files, nc, names=()):
    """Raise ValueError when a class id lies outside 0..nc-1; the message names files, lines and the likely mistake."""
    ids = np.concatenate([np.zeros(0, np.float32), *(rows[:, 0] for rows in labels)])
    if not len(ids) or (ids.min() >= 0 and ids.max() < nc):
        return
    bad = [file for file, rows in zip(label_files, labels, strict=True) if _outside(rows[:, 0], nc).any()]
    worst = int(ids.min() if ids.min() < 0 else ids.max())
    hint = "ids start at 0"
    if ids.min() >= 1 and ids.max() == nc:
        hint += ", these look 1-based (no 0, the highest is nc): subtract 1 from each"
    known = f"nc is {nc}{': ' if names else ''}{', '.join(list(names)[:10])}{', ...' if len(names) > 10 else ''}"
    raise ValueError(
        f"class ids must lie in 0..{nc - 1} ({known}), but {len(bad)} label file(s) hold others, "
        f"the worst id is {worst}: {', '.join(_first_bad_line(file, nc) for file in bad[:3])}; {hint}"
    )


def _outside(ids, nc):
    return (ids < 0) | (ids >= nc)


def _first_bad_line(label_file, nc):
    """`file:line` of the first row whose class id lies outside 0..nc-1."""
    for number, line in enumerate(split_lines(read_text(label_file).replace("\ufeff", "")), 1):
        class_id = class_of(line)
        if class_id is not None and not 0 <= class_id < nc:
            return f"{printable(label_file)}:{number}"
    return printable(label_file)
