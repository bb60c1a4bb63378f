"""One process owns a folder: it holds a lock on the small file .lock in it, as long as it lives.

The operating system keeps the lock (lockf), so that it is gone with the process however that ends, kill -9 included,
and holds between containers of one machine and on network file systems that have locks. It belongs to the process
alone: workers that were forked from it do not keep it alive, as they would with flock. Never open the file a second
time in the process that owns it: closing that copy would give the lock back.

The text of the file names the owner, for messages. On a file system without locks (and on Windows) it also decides:

- a process of this host that has ended, or whose number another one has now (it started at another time): taken over;
- another host, which cannot be asked: refused, because two runs in a folder of a shared disk ruin each other without
  a word; taken over, with a warning, when nothing was written there for an hour. A container that was made anew has
  another host name. Where locks work it goes on at once; elsewhere the message says which file to remove.
"""

import atexit
import errno
import json
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil

from utils.system.files import printable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

NAME = ".lock"
ABANDONED = 3600  # seconds without a new file after which the owner on another host counts as gone
END_LIMIT = 20.0  # seconds that a killed process gets to end: it frees its GPU before its lock
SAME_START = 2.0  # seconds by which two readings of the start of a process may differ
IN_USE = (errno.EAGAIN, errno.EACCES)
_held: dict[Path, tuple[int, int]] = {}  # {real path of the folder: (process id, descriptor of its lock)}


def own(folder: str | Path, advice: str) -> None:
    """Make this process the owner of an existing folder until it ends; does nothing if it is already.

    Raises ValueError when another living process is the owner, or the lock cannot be made; `advice` is what to do
    instead of waiting for its end.
    """
    place = Path(os.path.realpath(folder))
    if _is_ours(place):
        return
    try:
        deadline = time.monotonic() + END_LIMIT
        descriptor, is_locked = _open_and_lock(place / NAME, os.O_CREAT)
        while is_locked is False and _is_ending(_read(descriptor)) and time.monotonic() < deadline:
            os.close(descriptor)
            time.sleep(0.05)
            descriptor, is_locked = _open_and_lock(place / NAME, os.O_CREAT)
    except OSError as error:
        raise ValueError(f"{printable(Path(folder, NAME))} cannot be written ({error.strerror}); {advice}") from error
    try:
        _check_owner(folder, _read(descriptor), is_locked, advice)
        _write(descriptor)
    except OSError as error:  # a full disk, or something that is no file
        os.close(descriptor)
        raise ValueError(f"{printable(Path(folder, NAME))} cannot be written ({error.strerror}); {advice}") from error
    except BaseException:
        os.close(descriptor)
        raise
    _held[place] = os.getpid(), descriptor
    atexit.register(_give_up, place)


def check_free(folder: str | Path, advice: str) -> None:
    """Raise ValueError when a living process other than this one owns the folder; a missing folder is free."""
    place = Path(os.path.realpath(folder))
    if _is_ours(place) or not (place / NAME).is_file():
        return
    with suppress(OSError):  # it has just been removed
        descriptor, is_locked = _open_and_lock(place / NAME, 0)
        try:
            _check_owner(folder, _read(descriptor), is_locked, advice)
        finally:
            os.close(descriptor)


def keep(folder: str | Path) -> None:
    """Between two epochs: raise ValueError when another process has taken a folder that this one owns.

    That happens when somebody removes the lock or moves the folder while its owner lives, and on file systems without
    locks. A lock that is merely gone is made anew.
    """
    place = Path(os.path.realpath(folder))
    if not _is_ours(place):
        return
    descriptor = _held[place][1]
    with suppress(FileNotFoundError):
        owner = _read(descriptor)  # without locks another one writes its name into the same file
        is_named = owner is None or (owner["pid"], owner["host"]) == (os.getpid(), socket.gethostname())
        if is_named and os.path.samestat(os.stat(place / NAME), os.fstat(descriptor)):
            return
        raise ValueError(f"{printable(folder)} was taken by another process while this one wrote there: its lock was "
                         "removed, or the folder moved; this one ends, so that they do not mix")  # fmt: skip
    del _held[place]
    own(folder, "put the folder back")
    os.close(descriptor)
    logger.warning("%s was removed by somebody and is made anew", printable(Path(folder, NAME)))


def _is_ours(place):
    return _held.get(place, (0, 0))[0] == os.getpid()  # a process that was forked from the owner is none


def _open_and_lock(path, flags):
    """(descriptor, True, False, or None on a file system without locks) of the file that is at `path` now."""
    while True:
        descriptor = os.open(path, os.O_RDWR | flags, 0o666)
        try:
            is_locked = _lock(descriptor)
            if is_locked is not True or os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor, is_locked
        except FileNotFoundError:  # its owner ended and removed it between the two calls above
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor):
    if fcntl is None:
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        return False if error.errno in IN_USE else None


def _check_owner(folder, owner, is_locked, advice):
    """Raise ValueError when the `owner` (None: the file names none) may be alive."""
    if is_locked and owner and owner["host"] != socket.gethostname():
        logger.warning("%s was not given back by process %d on %s; end that process if it is still alive",
                       printable(folder), owner["pid"], owner["host"])  # fmt: skip
    if is_locked or (is_locked is None and owner is None):
        return
    where = f" {owner['pid']} on {printable(owner['host'])}" if owner else ""
    if is_locked is None and owner["host"] != socket.gethostname():
        age = time.time() - _newest_write(folder)
        if age > ABANDONED:
            logger.warning("%s is taken over from process%s: nothing was written there for %.0f minutes",
                           printable(folder), where, age / 60)  # fmt: skip
            return
        advice += f", or remove {printable(Path(folder, NAME))} if that process has ended"
    elif is_locked is None and not _is_alive(owner):
        return
    raise ValueError(f"{printable(folder)} is in use: process{where} writes there; wait for its end, or {advice}")


def _read(descriptor):
    """What the file says about its owner; None when it says nothing that makes sense."""
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        owner = json.loads(os.read(descriptor, 4096))
        return {"pid": int(owner["pid"]), "host": str(owner["host"]), "started": float(owner["started"])}
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _write(descriptor):
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps(identity(os.getpid())).encode())


def identity(pid: int) -> dict:
    """What tells the process `pid` of this host from all others, later ones of the same number as well."""
    return {"pid": pid, "host": socket.gethostname(), "started": psutil.Process(pid).create_time()}


def is_alive_here(owner: dict) -> bool:
    """Whether the process of an `identity` lives, on this host."""
    return owner["host"] == socket.gethostname() and _is_alive(owner)


def _is_alive(owner):
    try:
        process = psutil.Process(owner["pid"])
        is_ended = process.status() == psutil.STATUS_ZOMBIE  # of which nobody has taken note yet
        return not is_ended and abs(process.create_time() - owner["started"]) < SAME_START
    except (psutil.Error, ValueError, OverflowError):
        return False


def _is_ending(owner):
    """Whether a process of this host has been killed and has let go of its memory, but not yet of its files."""
    if owner is None or owner["host"] != socket.gethostname():
        return False
    try:
        return not psutil.Process(owner["pid"]).cmdline()
    except (psutil.Error, ValueError, OverflowError):
        return True


def _newest_write(folder):
    """When a file of a run was written last; the lock itself does not count."""
    times = [0.0]
    for path in (*Path(folder).glob("*"), *Path(folder).glob("weights/*")):
        with suppress(OSError):
            times.append(path.stat().st_mtime if path.name != NAME else 0.0)
    return max(times)


def _give_up(place):
    """At the end of the process: remove the file while it is still locked, unless it is another one's by now."""
    if not _is_ours(place):
        return
    descriptor = _held.pop(place)[1]
    with suppress(OSError):
        if os.path.samestat(os.stat(place / NAME), os.fstat(descriptor)):
            (place / NAME).unlink()
    os.close(descriptor)
