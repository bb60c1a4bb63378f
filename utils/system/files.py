"""Files and folders: find them, number run folders, write whole files or nothing, read text of any origin."""

import codecs
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import sys
import textwrap
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

PROJECT_ROOT = Path(__file__).resolve().parents[2]
OWN_TESTS = PROJECT_ROOT / "tests"  # its data sets are nobody's missing file

LONGEST_NAME = 255  # bytes of a file's name, on nearly all file systems
# The long marks come first, because the UTF-32 mark begins with the UTF-16 mark.
STAND_INS = (
    (r"version https?://(git-lfs|hawser)\.github\.com", "a Git LFS pointer, fetch the file with git lfs pull"),
    (r"<(!doctype html|html)\b", "a web page (HTML), the download failed"),
)
BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def user_cache(environment=os.environ):
    """The folder of this project below the user's cache folder. Raises OSError for a user without a home."""
    cache = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(cache):
        raise FileNotFoundError(errno.ENOENT, "no cache folder is known", cache)
    return Path(cache, "yolov7fast")


def check_file(path, suffixes=()):
    """The existing file that `path` means, as a string.

    Tried in order: `path` as it is (from the working directory), `path` from the project's own folder, then the only
    file below one of the two whose path ends with `path`. An empty `path` stays empty: "no such file was asked for".
    Raises ValueError when nothing or more than one file matches, or the suffix is not one of `suffixes`.
    """
    wanted = str(path)
    if not wanted:
        return ""
    if suffixes and Path(wanted).suffix.lower() not in suffixes:
        raise ValueError(f"{wanted}: expected a file ending in {' or '.join(suffixes)}")
    if os.path.isdir(wanted):
        raise ValueError(f"{wanted} is a folder, a file was expected")
    places = list(dict.fromkeys((Path.cwd(), PROJECT_ROOT)))
    for candidate in (Path(wanted).expanduser(), PROJECT_ROOT / wanted):
        if candidate.is_file():
            return str(candidate)
    for place in places:
        found = _files_ending_with(place, wanted)
        if len(found) > 1:
            raise ValueError(f"{wanted} does not exist and several files match, name one of: {', '.join(found)}")
        if found:
            logger.warning("%s does not exist; %s is taken instead, the only file of that name", wanted, found[0])
            return found[0]
    raise ValueError(f"{wanted} does not exist, and nothing of that name lies below {' or '.join(map(str, places))}")


def _files_ending_with(folder, wanted):
    """Sorted paths of all files below `folder` whose last parts equal those of `wanted`.

    Hidden folders and the tests of this project are left out.
    """
    parts = tuple(part for part in Path(wanted).parts if part not in (".", ".."))
    if not parts or Path(wanted).is_absolute():
        return []
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and Path(root, name) != OWN_TESTS]
        if parts[-1] in names:
            candidate = Path(root, parts[-1])
            if candidate.parts[-len(parts) :] == parts:
                found.append(str(candidate))
    return sorted(found)


def increment_path(path, exist_ok=False):
    """Create and return the run folder `path`; when it is taken, `path` + the next number (2, 3, ...).

    The number is one more than the greatest in use. `mkdir` is the arbiter, so that two runs which start at the same
    moment get two folders. With `exist_ok` the folder itself is used, new or not. ValueError when it cannot be made or
    written to.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not exist_ok:
            return _make_next_free(path)
        path.mkdir(exist_ok=True)
    except OSError as error:
        problem = f"run folder {printable(path)} cannot be made ({error.strerror})"
        raise ValueError(f"{problem}; choose another --project") from error
    if not os.access(path, os.W_OK):
        raise ValueError(f"run folder {printable(path)} cannot be written to; choose another --project")
    return path


def check_can_be_made(folder, option="--project"):
    """Raise ValueError when `folder` neither exists nor can be made, or cannot be written to; nothing is made."""
    existing = next(place for place in (Path(folder).absolute(), *Path(folder).absolute().parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        why = "cannot be written to" if existing.is_dir() else "is a file"
        raise ValueError(f"no run folder can be made in {printable(folder)} ({printable(existing)} {why}); "
                         f"choose another {option}")  # fmt: skip


def check_replaceable(file, option, suffixes, inputs=(), start=None):
    """Raise ValueError when writing the one file that `option` names would cost another one; nothing is made.

    A file that is there is written over only if its suffix is one of `suffixes` (with the dot), it is empty, or it
    begins with `start` [bytes], as what the command writes; and never if the command reads it as one of `inputs`. Of a
    link, what it leads to counts.
    """
    found = Path(os.path.realpath(file))  # is written to
    if os.path.islink(file) and not found.parent.is_dir():
        raise ValueError(f"{option} {printable(file)} is a link into a folder that does not exist; make the folder "
                         f"{printable(found.parent)}, or choose another {option}")  # fmt: skip
    check_can_be_made(found.parent if os.path.islink(file) else Path(file).parent, option)
    if found.is_dir():
        raise ValueError(f"{option} {printable(file)} is a folder; give the name of a file")
    if any(os.path.exists(place) and found.exists() and found.samefile(place) for place in inputs):
        raise ValueError(
            f"{option} {printable(file)} is read by this command and would be lost; choose another {option}"
        )
    is_own = found.is_file() and (found.suffix.lower() in suffixes or _is_empty_or_begins(found, start))
    if os.path.exists(file) and not is_own:  # devices and pipes too, of which `found` is not always a path
        raise ValueError(
            f"{option} {printable(file)} is no {suffixes[0]} file and would be lost; choose another {option}"
        )


def _is_empty_or_begins(file, start):
    """Whether a file is empty, as mktemp makes it, or begins with `start`."""
    with suppress(OSError), file.open("rb") as content:
        found = content.read(len(start or b"0"))
        return not found or found == start
    return False


def _make_next_free(path):
    candidate = path
    while True:
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            candidate = path.with_name(f"{path.name}{_highest_number(path) + 1}")


def _highest_number(path):
    """The greatest n among the existing entries `path`n; 1 when there is only `path` itself."""
    pattern = re.compile(re.escape(path.name) + r"(\d+)")
    numbers = [int(match[1]) for entry in path.parent.iterdir() if (match := pattern.fullmatch(entry.name))]
    return max(numbers, default=1)


@contextmanager
def replacement(target):
    """The path of a new temporary neighbour of `target`, which takes its place when the block ends without an error.

    Readers see the old file or the new one, never a part. After an error the old file is untouched and the temporary
    one is gone. A process that is killed leaves it behind, unlocked: see `remove_leftovers`.
    """
    target = Path(os.path.realpath(target))  # write through a symbolic link instead of replacing it
    temporary = target.with_name(f".{_start_of_name(target.name)}.{secrets.token_hex(6)}.tmp")
    descriptor = None
    try:
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield temporary
        os.replace(temporary, target)
        temporary.unlink(missing_ok=True)  # where both are names of one file, to rename does nothing
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:  # named after the file that the caller knows
            raise OSError(error.errno, os.strerror(error.errno), str(target)) from error
        raise
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _start_of_name(name):
    """What of a name of a file is in that of its temporary neighbour: all, or as much as a file system has room for."""
    return os.fsdecode(os.fsencode(name)[: LONGEST_NAME - len("..0123456789ab.tmp")])


def short_name(stem, end="", longest=LONGEST_NAME):
    """`stem` + `end`; if that is too long for a file system, with a check sum in place of the end of the stem."""
    room = longest - len(os.fsencode(end))
    if len(os.fsencode(stem)) > room:
        mark = f"-{hashlib.sha256(os.fsencode(stem)).hexdigest()[:12]}"
        stem = os.fsencode(stem)[: room - len(mark)].decode("utf-8", "ignore") + mark
    return stem + end


@contextmanager
def atomic_write(path, mode="wb", encoding=None, newline=None, fsync=False):
    """Open a `replacement` of `path` for writing.

    `fsync` waits until the data is on the disk, for files that must survive a power cut.
    """
    if "b" not in mode and encoding is None:
        encoding = "utf-8"
    with replacement(path) as temporary, temporary.open(mode, encoding=encoding, newline=newline) as file:
        yield file
        file.flush()
        if fsync:
            os.fsync(file.fileno())


def remove_leftovers(folder, name=None):
    """Delete the temporary files in `folder` whose writers were killed; only those of the file `name`, if given.

    A file that a living process is writing is locked, also when it is written from another container.
    """
    if not Path(folder).is_dir():
        return
    wanted = re.compile(rf"\.{re.escape(_start_of_name(name)) if name else '.+'}\.[0-9a-f]{{12}}\.tmp", re.DOTALL)
    for path in [entry for entry in Path(folder).iterdir() if wanted.fullmatch(entry.name)]:
        with suppress(OSError), path.open("r+b") as file:  # locked, or gone meanwhile
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            logger.info("%s of a run that was killed is removed", printable(path))


def below(path, folder):
    """`path` as it is called from `folder`, if it lies below it; else its absolute path."""
    path, folder = Path(os.path.abspath(path)), Path(os.path.abspath(folder))
    return path.relative_to(folder) if path.is_relative_to(folder) else path


def read_text(path):
    """The text of a file, whatever program wrote it.

    A byte order mark decides; without one the text is UTF-16 if every second byte of its beginning is zero, else UTF-8.
    Bytes that are not UTF-8 become lone surrogates, as Python does for file names, so a list of odd names still works.
    """
    data = Path(path).read_bytes()
    for mark, encoding in BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return data.decode(encoding, "replace").replace("\ufeff", "")
    start = data[:64]
    if len(start) >= 4 and len(data) % 2 == 0:
        for encoding, zeros, letters in (
            ("utf-16-le", start[1::2], start[::2]),
            ("utf-16-be", start[::2], start[1::2]),
        ):
            if not any(zeros) and all(letters):
                return data.decode(encoding, "replace")
    return data.decode("utf-8", "surrogateescape").replace("\ufeff", "")


def stand_in(text):
    """What a text that came in place of the content of a file is, and what to do; empty if it is no such text."""
    start = text[:200].removeprefix("\u00ef\u00bb\u00bf").lstrip().lower()  # a mark of UTF-8 that was read as Latin-1
    return next((kind for pattern, kind in STAND_INS if re.match(pattern, start)), "")


def link_to_nowhere(path):
    """The link that leads nowhere among the missing `path` and the folders above it, as text; empty if none does."""
    path = str(path)
    while path and not os.path.exists(path):
        if os.path.islink(path):
            return path
        path = os.path.dirname(path)
    return ""


def read_json(path):
    """The content of a JSON file that a person may have edited.

    Raises ValueError, which names the file, when it cannot be read, is no JSON, or has a key twice.
    """
    try:
        text = read_text(path)
        if kind := stand_in(text):
            raise ValueError(f"it is {kind}")
        return json.loads(text, object_pairs_hook=_unique_keys)
    except OSError as error:
        raise ValueError(f"{printable(path)} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # the second for brackets that are nested too deeply
        raise ValueError(f"{printable(path)} is no JSON: {error}") from error


def _unique_keys(pairs):
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{shown(next(key for key in keys if keys.count(key) > 1))} stands there twice")
    return content


def split_lines(text):
    """Lines of `text` ended by LF, CRLF or CR; unlike str.splitlines, no other character ends a line."""
    return re.split(r"\r\n|\r|\n", text)


def counted(number, one, many=None):
    """`1 image`, `2 images`: a number with the noun that it needs; `many` where an s is not enough."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def folded(text, width=79, indent=4):
    """`text` in lines of at most `width` columns, the later ones indented; a word stays whole."""
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def duration(seconds):
    """`4.2 s`, `3 min 4 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def cause_of(error, with_file=False):
    """Why something failed, as a part of a sentence; of an OSError without its number, and on request with its file."""
    cause = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    file = getattr(error, "filename", None) if with_file else None
    return printable(f"{file}: {cause}" if file else cause)


def shown(value, limit=200):
    """A value of a file for a message: on one line, and not longer than `limit` characters."""
    try:
        text = printable(repr(value))
    except ValueError:  # Python writes no whole number that is longer; yaml reads it in hexadecimal
        return f"a number of more than {sys.get_int_max_str_digits()} digits"
    return text if len(text) <= limit else f"{text[:limit]}..."


def printable(path):
    """`path` as one line that any terminal or log file accepts; line ends, odd blanks, undecodable bytes as escapes."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in str(path))
