"""Scan a data set: verify every image, read every label file, count, repair, report, and remember the result."""

import logging
import os
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from utils.data.image_list import FILE_IGNORED, LINE_IGNORED, find_images, img2label_paths
from utils.data.images import verify_image
from utils.data.label_cache import cache_location, load_cache, save_cache, signature
from utils.data.label_rows import ROW_DROPPED, ROW_REPAIRED, Note, gather, parse_label_text
from utils.ops.polygons import Polygons
from utils.system.files import printable, read_text, split_lines

logger = logging.getLogger(__name__)

IMAGE_DROPPED = "image dropped"
NO_LABEL_FILE = "no label file, image is background"
DROPS = (IMAGE_DROPPED, ROW_DROPPED, LINE_IGNORED, FILE_IGNORED)
FOUND, MISSING, EMPTY, DROPPED = "found", "missing", "empty", "dropped"
THREADS = min(8, os.cpu_count() or 1)


@dataclass
class ScannedDataset:
    """The usable images of a data set with their labels, in the order of the data set; all lists are parallel."""

    img_files: list  # paths as strings
    label_files: list  # where the label file is or would be
    labels: list  # float32 [n x 5: class, x, y, w, h normalised] an image
    segments: list  # an image: Polygons, none at all or a float32 [m x 2] for each row ([0 x 2] for a box row)
    shapes: np.ndarray  # float64 [images x 2: width, height] of the upright images
    counts: dict  # found (empty ones included), missing, empty, dropped, total images; dropped_rows, repaired_rows
    findings: list  # utils.data.label_rows.Finding: everything that was dropped, repaired or missing

    @property
    def messages(self):
        """One line a finding, for people."""
        return [str(finding) for finding in self.findings]


class _Record(NamedTuple):
    """What the scan of one image gives; `size` is None when the image is dropped."""

    status: str
    size: tuple | None
    rows: np.ndarray
    segments: list
    notes: list


def scan_dataset(path, prefix=""):
    """Read the data set at `path` (a folder, a list file, or a list of those); `prefix` begins every message.

    Uses the label cache when nothing has changed since it was written. One line of log sums up, then each reason for a
    repair or a drop has its own warning with the first places. Raises ValueError when there is no usable image.
    """
    img_files, list_notes = find_images(path)
    label_files = img2label_paths(img_files)
    cache_file = cache_location(path, label_files)
    present = signature(img_files, label_files)
    fields = load_cache(cache_file, present)
    title = f"{prefix}Scanning {printable(os.path.dirname(label_files[0]) or '.')}"
    if fields is None:
        fields = _scan(img_files, label_files, title)
        if fields["img_files"]:
            save_cache(cache_file, present, fields)
    else:
        total = fields["counts"]["total"]
        tqdm(total=total, initial=total, desc=f"{title} (cached) ... {_describe_counts(fields['counts'])}").close()
    fields["findings"] = gather(list_notes) + fields["findings"]
    scanned = ScannedDataset(**fields)
    logger.info("%s%s", prefix, describe_scan(scanned))
    for message in scanned.messages:
        logger.warning("%s%s", prefix, message)
    if not scanned.img_files:
        raise ValueError(f"{prefix}none of the {len(img_files)} images can be used. {'. '.join(scanned.messages)}")
    return scanned


def _scan(img_files, label_files, title):
    """The fields of ScannedDataset, by looking at every file."""
    records, status = [], Counter()
    with ThreadPool(THREADS) as pool, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")  # what is wrong with an image is reported below
        pairs = zip(img_files, label_files, strict=True)
        bar = tqdm(pool.imap(_scan_one, pairs, chunksize=16), desc=title, total=len(img_files))
        for record in bar:
            records.append(record)
            status[record.status] += 1
            bar.desc = f"{title} ... {_describe_counts(_counts(status))}"
        bar.refresh()
        bar.close()
    kept = [index for index, record in enumerate(records) if record.status != DROPPED]
    findings = gather(note for record in records for note in record.notes)
    return {
        "img_files": [img_files[index] for index in kept],
        "label_files": [label_files[index] for index in kept],
        "labels": [records[index].rows for index in kept],
        "segments": [Polygons.of(records[index].segments) for index in kept],
        "shapes": np.array([records[index].size for index in kept], np.float64).reshape(-1, 2),
        "counts": _counts(status) | _row_counts(findings),
        "findings": findings,
    }


def _scan_one(pair):
    """Verify one image and read its labels; pair = (image path, label path)."""
    img_file, label_file = pair
    try:
        size = verify_image(img_file)
    except ValueError as error:
        return _dropped(str(error), img_file)
    try:
        text = read_text(label_file)
    except FileNotFoundError:
        place = f"{printable(img_file)} (looked for {printable(label_file)})"
        return _Record(MISSING, size, np.zeros((0, 5), np.float32), [], [Note(NO_LABEL_FILE, "labels missing", place)])
    except OSError as error:
        return _dropped(f"label file cannot be read ({error.strerror})", label_file)
    rows, segments, notes = parse_label_text(text, label_file)
    if not len(rows) and notes:
        # an image whose objects cannot be read must not be trained as background
        return _dropped("no usable row in its label file", label_file, notes)
    return _Record(FOUND if len(rows) else EMPTY, size, rows, segments, notes)


def _dropped(reason, place, notes=()):
    return _Record(
        DROPPED, None, np.zeros((0, 5), np.float32), [], [*notes, Note(IMAGE_DROPPED, reason, printable(place))]
    )


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
    """One line: how many images and rows of which kind, and in brackets why."""
    reasons = defaultdict(list)
    for finding in scanned.findings:
        reasons[finding.effect].append(f"{finding.reason} {finding.times}x")
    counts = scanned.counts
    parts = [
        f"{counts['total']} images", f"{counts[FOUND]} found", f"{counts[EMPTY]} of them empty",
        _with_reasons(f"{counts[MISSING]} missing", reasons[NO_LABEL_FILE]),
        _with_reasons(f"{counts[DROPPED]} dropped", reasons[IMAGE_DROPPED]),
        _with_reasons(f"{counts['repaired_rows']} rows repaired", reasons[ROW_REPAIRED]),
        _with_reasons(f"{counts['dropped_rows']} rows dropped", reasons[ROW_DROPPED]),
    ]  # fmt: skip
    for effect in (LINE_IGNORED, FILE_IGNORED):
        if reasons[effect]:
            parts.append(_with_reasons(effect, reasons[effect]))
    return ", ".join(parts)


def _with_reasons(text, reasons):
    return f"{text} ({'; '.join(reasons)})" if reasons else text


def _describe_counts(counts):
    return f"{counts[FOUND]} found, {counts[MISSING]} missing, {counts[EMPTY]} empty, {counts[DROPPED]} dropped"


def check_labels(dataset, data, strict=False):
    """Raise ValueError for class ids beyond the data yaml and, with `strict`, for everything that the scan dropped."""
    check_class_ids(dataset.labels, dataset.label_files, data.nc, data.names)
    if strict:
        check_nothing_dropped(dataset.findings)


def check_nothing_dropped(findings):
    """Raise ValueError when the scan passed over an image, a row, a list entry or a file (--strict-data)."""
    dropped = [finding for finding in findings if finding.effect in DROPS]
    if dropped:
        raise ValueError(
            f"--strict-data: {'. '.join(map(str, dropped))}. Repair them, or leave the flag out to go on without them"
        )


def check_has_boxes(labels, label_files):
    """Raise ValueError when a training set holds no box at all; the message says what was looked for."""
    if any(map(len, labels)):
        return
    read = [file for file in label_files if os.path.isfile(file)]
    if read:
        problem = f"no boxes in {len(read)} label files, e.g. {printable(read[0])}"
    else:
        problem = f"no label files for {len(label_files)} images, e.g. {printable(label_files[0])} does not exist"
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
    for number, line in enumerate(split_lines(read_text(label_file)), 1):
        rows, _, _ = parse_label_text(line)
        if _outside(rows[:, 0], nc).any():
            return f"{printable(label_file)}:{number}"
    return printable(label_file)
