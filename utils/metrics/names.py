"""Names by which the files and tables of a run tell images and classes apart."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


def image_names(paths: Iterable[str | Path], key: Callable = str.casefold) -> dict[str, str]:
    """{path: name} of images: the stems, if all are different.

    Else the paths below the folder that holds them all (clipA/00), without their suffixes if that is enough. Two names
    are different if their `key` is; by default capitals do not count, because some disks do not tell them apart.
    """
    files = {str(path): os.path.abspath(path) for path in paths}
    folder = _common_folder(files.values())
    below = {path: Path(file).relative_to(folder) for path, file in files.items()}
    forms = (
        {path: inside.stem for path, inside in below.items()},
        {path: inside.with_suffix("").as_posix() for path, inside in below.items()},
        {path: inside.as_posix() for path, inside in below.items()},
    )
    num_files = len(set(files.values()))
    for made_equal in (key, str):  # a folder with A.jpg and a.jpg is on a disk that tells them apart
        for form in forms:
            if len({made_equal(name) for name in form.values()}) == num_files:
                return form
    return forms[-1]


def _common_folder(files):
    folders = {os.path.dirname(file) for file in files}
    return os.path.commonpath(folders) if folders else ""


def class_names(
    names: Sequence, taken: Iterable[str] = (), form: Callable = str, longest: int | None = None
) -> list[str]:
    """The `names` of classes [nc], cut to `longest` letters, as texts that are all different.

    Names with the same `form`, which is how they are used later, get their class ids: `dog (3)`; so do names that are
    in `taken`.
    """
    shown = [str(name)[:longest] for name in names]
    counts = Counter(map(form, [*taken, *shown]))
    for index, name in enumerate(shown):
        if counts[form(name)] > 1:
            mark = ""
            while counts[form(shown[index])]:
                mark += f" ({index})"
                shown[index] = name[: longest and longest - len(mark)] + mark
            counts[form(shown[index])] = 1
    return shown
