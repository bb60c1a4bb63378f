"""From a path entry of the data yaml to the sorted list of images, and from images to their label files."""

import os
import re
from functools import cache
from pathlib import Path

from utils.data.images.reading import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from utils.data.labels.rows import Note
from utils.system.files import printable, read_text, split_lines, stand_in

LINE_IGNORED = "list entry ignored"
FILE_IGNORED = "file ignored"
MAX_SHOWN = 80  # characters of a list line in a message
# Images that are not read here; other files (archives, annotations) beside the images are nobody's concern.
OTHER_IMAGE_SUFFIXES = (
    "apng", "arw", "avif", "cr2", "cr3", "dcm", "eps", "exr", "gif", "hdr", "heic", "heif", "hif", "ico", "j2k",
    "jfif", "jp2", "jpe", "jxl", "nef", "orf", "pbm", "pef", "pgm", "pnm", "ppm", "psd", "raf", "raw", "rw2", "srw",
    "svg", "tga",
)  # fmt: skip
NOT_SUPPORTED = "image suffix not supported"
LABEL_SUFFIXES = ("txt", "txt.txt", "xml", "json", "csv")  # of files that may be the labels of an image of that name
FOR_LABELS = re.compile("^(label|annotation)|(label|annotation)s?$")  # folders, in lower case
MAX_ABOVE = 3  # folders above an image in which one for labels is looked for


def expand_paths(path):
    """Sorted image paths for a directory, a list file, or a list of those; ValueError names what does not work.

    Sorting is by code points, upper case before lower case and a10 before a2, as in stock YOLOv7.
    """
    return find_images(path)[0]


def img2label_paths(paths):
    """Label path of every image: the last folder called `images` becomes `labels`, the suffix becomes `txt`."""
    return [_label_path(path) for path in paths]


def find_images(path):
    """(sorted image paths without repetition, notes about what was passed over) for `expand_paths`."""
    entries = path if isinstance(path, (list, tuple)) else [path]
    found, notes = [], []
    for entry in entries:
        entry = Path(entry)
        if entry.is_dir():
            below, remarks = _images_below(str(entry))
        elif entry.is_file() and (kind := _kind_of(entry.name)):
            raise ValueError(f"{printable(entry)} is {kind}; a folder of images or a list of image paths is needed")
        elif entry.is_file():
            below, remarks = _images_listed_in(entry)
        else:
            raise ValueError(
                f"{printable(entry)} does not exist; a folder of images or a list of image paths is needed"
            )
        found += below
        notes += remarks
    unique = _without_repetitions(sorted(found), notes)
    if not unique:
        raise ValueError(
            f"no images in {', '.join(map(printable, entries))}; supported suffixes: {', '.join(IMAGE_SUFFIXES)}"
            + "".join(f"; {note.place}: {note.reason}" for note in notes[:3])
        )
    return unique, notes


def _is_image(name, suffixes=IMAGE_SUFFIXES):
    return "." in name and name.rpartition(".")[2].lower() in suffixes


def _kind_of(name):
    """What a file that is no list is, by its suffix."""
    kinds = {
        "one image": IMAGE_SUFFIXES + OTHER_IMAGE_SUFFIXES,
        "a video": VIDEO_SUFFIXES,
        "an archive": ("zip", "tar", "gz", "tgz", "7z", "rar"),
        "a data yaml": ("yaml", "yml"),
        "a json file": ("json",),
    }
    return next((kind for kind, suffixes in kinds.items() if _is_image(name, suffixes)), "")


def _images_below(folder):
    """(image paths, notes) of `folder` and all folders below it.

    Hidden ones are left out, symbolic links to folders are followed. The notes name images of other formats, and
    folders that cannot be read.
    """
    found, notes = [], []

    def note_unreadable(error):
        notes.append(Note(FILE_IGNORED, f"folder cannot be read ({error.strerror})", printable(error.filename)))

    for root, folders, names in os.walk(folder, onerror=note_unreadable, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".") and not _leads_back(root, name)]
        names = [name for name in names if not name.startswith(".")]
        found += [os.path.join(root, name) for name in names if _is_image(name)]
        others = [os.path.join(root, name) for name in names if _is_image(name, OTHER_IMAGE_SUFFIXES)]
        notes += [Note(FILE_IGNORED, NOT_SUPPORTED, printable(file)) for file in others]
    return found, notes


def _leads_back(root, name):
    """Whether folder `name` in `root` is a symbolic link to one of the folders that lead to it: an endless loop."""
    folder = Path(root, name)
    return folder.is_symlink() and any(folder.samefile(parent) for parent in folder.parents)


def _images_listed_in(list_file):
    """(image paths, notes) of a text file with one path a line; blank lines and `#` comments are skipped."""
    found, notes = [], []
    folder, text = str(list_file.parent), read_text(list_file)
    if kind := stand_in(text):
        raise ValueError(f"{printable(list_file)} is {kind}")
    for number, line in enumerate(split_lines(text), 1):
        line = line.strip()
        if not line:
            continue
        path = _resolve(line, folder)
        if path and _is_image(path):
            found.append(path)
        elif not line.startswith("#"):
            reason = "not an image suffix" if path else "no such file, neither beside the list nor from here"
            reason = NOT_SUPPORTED if path and _is_image(path, OTHER_IMAGE_SUFFIXES) else reason
            notes.append(Note(LINE_IGNORED, reason, f"{printable(list_file)}:{number} {printable(line)[:MAX_SHOWN]}"))
    return found, notes


def _resolve(line, folder):
    """The existing file that a list line means, relative to the list's `folder`, else to the working directory."""
    for text in dict.fromkeys((line, line.replace("\\", "/"))):  # the second for lists made on Windows
        text = text[2:] if text.startswith("./") else text
        for candidate in (os.path.join(folder, text), text):
            if os.path.isfile(candidate):
                return candidate
    return None


def _without_repetitions(paths, notes):
    """`paths` without those that name a file again; each repetition is added to `notes`."""
    unique = {}
    for path in paths:
        if unique.setdefault(os.path.abspath(path), path) is not path:
            notes.append(Note(LINE_IGNORED, "the image is named more than once", printable(path)))
    return list(unique.values())


def _label_path(path):
    folder, separator, name = path.replace(os.sep, "/").rpartition("/")
    parts = folder.split("/")
    if "images" in parts:
        last = len(parts) - 1 - parts[::-1].index("images")
        parts[last] = "labels"
    return "/".join(parts) + separator + name.rpartition(".")[0] + ".txt"


def labels_next_door(missing):
    """For every (image, label path that does not exist) a file that may hold the labels after all; "" without one.

    Names may differ in case and the format may be another. Looked for in the folder of the label, beside the image, in
    the folders beside that of the label (other splits), and in folders for labels beside any that the image lies in.
    What belongs to another image is left out.
    """

    @cache
    def names_in(folder):
        """{name in lower case: name} of a folder."""
        try:
            return {name.lower(): name for name in os.listdir(folder or ".")}
        except OSError:
            return {}

    def for_labels(folder):
        """The folders in `folder` that are called after labels, such as Labels, train_labels, annotations."""
        return [os.path.join(folder, name) for lower, name in names_in(folder).items() if FOR_LABELS.search(lower)]

    @cache
    def folders_for(image_folder, label_folder):
        above = os.path.dirname(label_folder)
        # beside a folder of images lies anything; beside one of labels, other splits
        splits = names_in(above).values() if label_folder != image_folder else ()
        found = [label_folder, image_folder, above, *(os.path.join(above, name) for name in splits)]
        outer, inner = image_folder, []  # the folders between the two, that of all images left out, may be there again
        for _ in range(MAX_ABOVE + 1):
            found += [os.path.join(name, *below) for name in for_labels(outer) for below in (inner[1:], [])]
            for split in ([name for name in inner if name != "images"], inner[1:]):  # train/images and img/train too
                found.append(os.path.join(outer, "labels", *split))
                found += for_labels(os.path.join(outer, *split))
            outer, folder = os.path.split(outer)
            if not folder:
                break
            inner = [folder, *inner]
        return list(dict.fromkeys(found))

    def nearest(image, label):
        stem = os.path.basename(label).lower().removesuffix("txt")
        wanted = [stem + suffix for suffix in LABEL_SUFFIXES] + [os.path.basename(image).lower() + ".txt"]
        for folder in folders_for(os.path.dirname(image), os.path.dirname(label)):
            for lower in wanted:
                name = names_in(folder).get(lower)
                if name and not _is_label_of_another(folder, stem, image):
                    return os.path.join(folder, name)
        return ""

    def _is_label_of_another(folder, stem, image):
        parts = folder.replace(os.sep, "/").split("/")
        if "labels" not in parts:
            return False
        last = len(parts) - 1 - parts[::-1].index("labels")
        images = "/".join([*parts[:last], "images", *parts[last + 1 :]])
        own = os.path.abspath(images) == os.path.abspath(os.path.dirname(image))
        return not own and any(stem + suffix in names_in(images) for suffix in IMAGE_SUFFIXES)

    return [nearest(image, label) for image, label in missing]
