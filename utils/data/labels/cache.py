"""The label cache: what a scan found, in one NumPy archive without pickled objects, so that loading it runs no code.

A cache is used only if its signature equals that of the present files: format version, every path in order, size,
modification time, and change time (which no program can set back) of every image and label. Anything else about it that
is wrong means a new scan, never an error.
"""

import hashlib
import json
import logging
import os
from pathlib import Path

import numpy as np

from utils.data.labels.rows import Finding
from utils.ops.polygons import Polygons
from utils.system.files import LONGEST_NAME, atomic_write, link_to_nowhere, printable, remove_leftovers, short_name

logger = logging.getLogger(__name__)

FORMAT_VERSION = 8  # raise it whenever the content of the archive or the rules of the scan change
ABSENT = (-1, -1, -1)
LONGEST_CACHE_NAME = LONGEST_NAME - 50  # bytes; the caches of pixels beside it have longer names


def cache_location(path, label_files):
    """Where the scan of `path` (an entry or a list of entries) is kept.

    Beside the last entry if that is a list file, else beside the folder of the first label file. The name carries a
    digest of all entries: no two data sets share a file, and stock YOLOv7's caches, which are pickles, stay untouched.
    """
    entries = [os.path.abspath(entry) for entry in (path if isinstance(path, (list, tuple)) else [path])]
    anchor = Path(entries[-1]) if os.path.isfile(entries[-1]) else Path(label_files[0]).parent.absolute()
    digest = hashlib.sha256("\n".join(entries).encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return anchor.with_name(short_name(anchor.name, f".{digest}.cache", LONGEST_CACHE_NAME))


def signature(img_files, label_files, keypoints=None):
    """A digest of everything that the result of a scan depends on, but for row forms that another scan has told."""
    digest = hashlib.sha256(f"version {FORMAT_VERSION}, keypoints {keypoints}\n".encode())
    for file in (*img_files, *label_files):
        digest.update(os.fsencode(file))
        digest.update(" {} {} {}\n".format(*_size_and_times(file)).encode())
    return digest.hexdigest()


def _size_and_times(file):
    try:
        status = os.stat(file)
    except OSError:
        link = link_to_nowhere(file)
        if not link:
            return ABSENT
        status = os.lstat(link)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def load_cache(file, expected_signature):
    """The fields of a scan as a dict, or None when there is no cache or it does not fit the present files."""
    if not Path(file).is_file():
        return None
    try:
        with np.load(file, allow_pickle=False) as archive:
            if str(archive["signature"]) != expected_signature or "row_forms" not in archive:  # of an earlier version
                return None
            return _unpack(archive)
    except Exception as error:  # whatever lies there, a new scan replaces it
        logger.warning("%s: not a usable label cache (%s), scanning again", printable(file), type(error).__name__)
        return None


def save_cache(file, its_signature, fields):
    """Write the fields of a scan; a folder that cannot be written to costs a warning, not the run."""
    try:
        remove_leftovers(Path(file).parent, Path(file).name)
        with atomic_write(file) as stream:
            np.savez(stream, signature=np.array(its_signature), **_pack(fields))
    except OSError as error:
        logger.warning(
            "%s: label cache not saved (%s), the next run scans again", printable(file), error.strerror or error
        )


def _pack(fields):
    """Ragged lists as one long array and a list of lengths each; text as JSON bytes."""
    text = {key: fields[key] for key in ("img_files", "label_files", "counts", "findings")}
    return {
        "text": np.frombuffer(json.dumps(text).encode(), np.uint8),
        "row_forms": np.frombuffer(json.dumps(fields["row_forms"]).encode(), np.uint8),
        "shapes": fields["shapes"],
        "labels": np.concatenate(fields["labels"]),
        "rows_per_image": np.array([len(rows) for rows in fields["labels"]]),
        "segments_per_image": np.array([len(per_image) for per_image in fields["segments"]]),
        "points": np.concatenate([polygons.points for polygons in fields["segments"]]),
        "points_per_segment": np.concatenate([polygons.counts for polygons in fields["segments"]]),
    }


def _unpack(archive):
    text = json.loads(archive["text"].tobytes())
    text["findings"] = [Finding(*finding) for finding in text["findings"]]
    counts = _split(archive["points_per_segment"], archive["segments_per_image"])
    points = _split(archive["points"], [own.sum() for own in counts])
    labels, images = archive["labels"], len(text["img_files"])
    lengths = [len(archive[key]) for key in ("shapes", "rows_per_image", "segments_per_image")]
    if lengths != [images] * 3 or len(text["label_files"]) != images or not (archive["shapes"] > 0).all():
        raise ValueError("its parts are of different lengths")
    rows = archive["rows_per_image"]
    if (rows < 0).any() or rows.sum() != len(labels) or labels.dtype != np.float32 or not np.isfinite(labels).all():
        raise ValueError("its labels are damaged")
    return {
        **text,
        "row_forms": {int(length): form for length, form in json.loads(archive["row_forms"].tobytes()).items()},
        "shapes": archive["shapes"],
        "labels": _split(labels, rows),
        "segments": [Polygons(*parts) for parts in zip(points, counts, strict=True)],
    }


def _split(array, lengths):
    return np.split(array, np.cumsum(lengths)[:-1]) if len(lengths) else []
