"""A run goes on by itself when torchrun starts its processes again (--max-restarts).

After a failure torchrun starts all processes anew with the command line of the first time. A small file in the folder
of a run tells which launcher it belongs to, as that outlives its processes. TORCHELASTIC_RESTART_COUNT does not tell a
restart: it stays 0 on a machine whose own processes did not fail. Most run ids are the word "none".
"""

import glob
import json
import logging
import os
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

from utils.system import folder_lock
from utils.system.files import atomic_write, printable

logger = logging.getLogger(__name__)

NAME = ".launcher"


def is_launched() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def go_on(opt: Namespace) -> bool:
    """Let rank 0 go on with the run that an earlier process of its launcher has begun; returns whether there is one.

    Sets opt.resume to its last checkpoint, or opt.save_dir to its folder if it has none yet.
    """
    run = _begun(opt) if is_launched() else None
    if run is not None:
        last = run / "weights" / "last.pt"
        if last.is_file() and last.stat().st_mtime_ns >= (run / NAME).stat().st_mtime_ns:  # not of an older run there
            opt.resume = str(last)
            logger.info("Started again by torchrun: the run goes on from %s", printable(last))
        elif opt.resume:
            logger.info("Started again by torchrun before a new checkpoint: the run resumes %s again", opt.resume)
        else:
            opt.save_dir = str(run)
            logger.info("Started again by torchrun before the first checkpoint: %s begins anew", printable(run))
    return run is not None


def note(folder: str | Path) -> None:
    """Write into a run folder which launcher has begun or resumed the run, unless that stands there already."""
    if is_launched() and not _is_ours(_read(folder)):
        with atomic_write(Path(folder, NAME), "w") as file:
            json.dump({"launcher": folder_lock.identity(os.getppid()), "process": os.getpid()}, file)


def _begun(opt):
    """The folder of the run that an earlier process of this launcher has begun; None if there is none."""
    if opt.resume is True:
        files = Path().glob(f"**/{NAME}")
    else:
        run = Path(os.path.abspath(opt.resume)).parent.parent if opt.resume else Path(opt.project, opt.name)
        files = run.parent.glob(f"{glob.escape(run.name)}*/{NAME}")
    for folder in (file.parent for file in files):
        record = _read(folder)
        if _is_ours(record) and record["process"] != os.getpid():
            return folder
    return None


def _read(folder):
    with suppress(OSError, ValueError):
        return json.loads(Path(folder, NAME).read_text(encoding="utf-8"))
    return None


def _is_ours(record):
    """Whether a record names the launcher of this process."""
    try:
        return record["launcher"]["pid"] == os.getppid() and folder_lock.is_alive_here(record["launcher"])
    except (TypeError, KeyError):
        return False
