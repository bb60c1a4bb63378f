"""Where a run lives and how it is continued: options are completed here, before anything is built."""

import logging
import os
from argparse import Namespace
from pathlib import Path

from utils.config.data_yaml import read_yaml
from utils.config.flags import KEPT, STAYS, TRAIN_FLAGS
from utils.config.options import (
    check_train_options,
    explicit_options,
    read_options,
    save_options,
    train_parser,
    warn_about_idle_options,
)
from utils.engine import early_stopping, resume
from utils.engine.checkpoint_reader import full_state_path, read_checkpoint
from utils.run import restarts
from utils.run.entry import NothingToDo
from utils.system.distributed import Ranks
from utils.system.files import (
    below,
    check_can_be_made,
    check_file,
    counted,
    increment_path,
    printable,
    remove_leftovers,
)
from utils.system.folder_lock import check_free, own
from utils.system.rendezvous import text_of_rank_zero

logger = logging.getLogger(__name__)
OTHER_FOLDER = "choose another --name or --project"


def prepare_train_options(opt: Namespace, ranks: Ranks) -> Namespace:
    """Complete the options of a new or resumed run: files found, batch divided among processes.

    Nothing is written yet, but the folder of a run that is resumed is locked.
    Adds world_size, global_rank and total_batch_size, working_dir (the folder that relative paths count from, which the
    caller has to enter), and save_dir, which stays empty until `open_run_folder`; batch_size becomes the share of one
    process.
    Raises ValueError for values that no run could use and for a folder in use, NothingToDo for a finished run.
    """
    opt.save_dir = ""
    is_restart = ranks.is_main and restarts.go_on(opt)
    if restarts.is_launched():
        _follow_rank_zero(opt, ranks)
    if opt.resume:
        opt = resumed_options(opt, ranks, is_restart)
    else:
        check_train_options(opt)
        opt.data, opt.hyp = (str(check_file(path)) for path in (opt.data, opt.hyp))
        opt.cfg = str(check_file(opt.cfg)) if opt.cfg else ""
        opt.working_dir = os.getcwd()
        check_can_be_made(Path(opt.project))
        if opt.evolve:  # a search wants one score a run, and no files
            opt.notest = opt.nosave = True
        folder, may_exist = _wanted_folder(opt)
        if ranks.is_main and may_exist:
            check_free(folder, OTHER_FOLDER)
    if opt.evolve and ranks.is_distributed:
        raise ValueError("--evolve runs in a single process; start it without a launcher")
    warn_about_idle_options(opt)
    opt.total_batch_size, opt.world_size, opt.global_rank = opt.batch_size, ranks.world_size, ranks.rank
    if opt.total_batch_size == -1:  # what fits is measured later
        return opt
    if opt.total_batch_size % ranks.world_size:
        raise ValueError(f"--batch-size {opt.batch_size} does not divide among {ranks.world_size} processes")
    opt.batch_size = opt.total_batch_size // ranks.world_size
    return opt


def _follow_rank_zero(opt, ranks):
    """All ranks resume what rank 0 does, which may have been restarted, or stand in another folder."""
    last = ""
    if ranks.is_main and opt.resume:
        last = os.path.abspath(opt.resume if isinstance(opt.resume, str) else newest_checkpoint())
    opt.resume = text_of_rank_zero(last, ranks.rank, ranks.world_size)


def open_run_folder(opt: Namespace, ranks: Ranks) -> None:
    """Choose and make the folder of a new run, in the main process; call it when all input has been found good.

    Called again, it changes nothing. A resumed run notes what has changed of its options in opt.yaml, so that a further
    --resume knows it.
    """
    if ranks.is_main and opt.resume:
        path = Path(opt.save_dir) / "opt.yaml"
        names = [key for key, flag in TRAIN_FLAGS.items() if flag.resume == STAYS]
        names += ["total_batch_size", "world_size", "working_dir"]
        stored = Namespace()
        vars(stored).update(read_yaml(path) | {name: getattr(opt, name) for name in names})  # a key may be a number
        save_options(stored, path)
    elif ranks.is_main:
        folder, may_exist = _wanted_folder(opt)
        opt.save_dir = opt.save_dir or str(increment_path(folder, exist_ok=may_exist))
        own(opt.save_dir, OTHER_FOLDER)
    if ranks.is_main:
        restarts.note(opt.save_dir)
    for folder in (Path(opt.save_dir), Path(opt.save_dir) / "weights") if ranks.is_main else ():
        remove_leftovers(folder)


def _wanted_folder(opt):
    """The folder that a new run asks for, and whether it may exist already."""
    return Path(opt.project) / ("evolve" if opt.evolve else opt.name), opt.exist_ok or bool(opt.evolve)


def resumed_options(opt: Namespace, ranks: Ranks, is_restart: bool = False) -> Namespace:
    """Options of the run that `opt.resume` names (True: the newest one), which continues in the folder it is in now.

    After a restart the command line is that of the start, and says nothing new.
    """
    last = Path(os.path.abspath(opt.resume if isinstance(opt.resume, str) else newest_checkpoint()))
    here = Path.cwd()
    if not ranks.is_main and not last.is_file():
        raise ValueError(f"{last}, which rank 0 resumes, is not on the machine of rank {ranks.rank}: copy the run "
                         "folder there, to the same place, or put it on a disk that all machines share")  # fmt: skip
    run = last.parent.parent
    if ranks.is_main and (run / "opt.yaml").is_file():  # before its checkpoint is read, or a living run writes another
        own(run, "start a new run with --weights")
    checkpoint = read_checkpoint(last)
    if checkpoint.optimizer is None and full_state_path(last).exists():
        last = full_state_path(last)
        checkpoint = read_checkpoint(last)

    old, started = read_options(run / "opt.yaml")
    if old.evolve:
        raise ValueError(f"{run / 'opt.yaml'}: evolve has to be 0: a search goes on with --evolve, not with --resume")
    typed, asked = explicit_options(train_parser()), old.epochs
    ignored = sorted(name for name in typed if TRAIN_FLAGS[name].resume == KEPT)
    if ignored and not is_restart:
        logger.warning("--resume keeps the options of %s; ignored: %s", below(run, here), ", ".join(ignored))
    vars(old).update({name: value for name, value in typed.items() if name not in ignored})

    if checkpoint.optimizer is None or checkpoint.epoch is None:
        found = below(last, here)
        if old.epochs > asked:  # more is wanted than this file can do
            raise ValueError(f"{found} is finished and holds no training state, which --epochs {old.epochs} needs: put "
                             f"last_full.pt back beside it, or start a new run with --weights {found}")  # fmt: skip
        raise NothingToDo(f"{found} is finished and holds no training state: start a new run with --weights {found}")
    _refuse_finished(checkpoint, old, below(run, here))
    old.resume = True
    try:
        check_train_options(old)
    except ValueError as error:
        also = " with what was typed" if typed.keys() - {"resume", *ignored} else ""
        raise ValueError(f"{run / 'opt.yaml'}{also}: {error}") from error
    folder = _folder_of_paths(started, run, old.data)
    if folder is None:
        folder, old.data = here, _found_from_here(old.data, run)
        if not Path(old.hyp).is_absolute():  # a namesake may lie here
            old.hyp = ""
    old.working_dir, old.cfg = str(folder), ""
    old.weights, old.save_dir = str(below(last, folder)), str(below(run, folder))
    old.hyp = old.hyp if (folder / old.hyp).is_file() else str(run / "hyp.yaml")
    _say_which_is_read(run, folder / old.hyp)
    where = "" if folder == here else f"; relative paths count from {folder}"
    logger.info("Resuming %s after epoch %d%s", old.save_dir, checkpoint.epoch, where)
    return old


def _say_which_is_read(run, hyp_file):
    """Warn when somebody has edited the hyp.yaml of a run folder, which only tells what the run was started with."""
    record, options = run / "hyp.yaml", run / "opt.yaml"  # written in this order
    if not record.is_file() or record.samefile(hyp_file) or record.stat().st_mtime <= options.stat().st_mtime:
        return
    try:
        kept, read = read_yaml(record), read_yaml(hyp_file)
    except ValueError as error:
        logger.warning("%s; nothing of it is used, %s is read", error, printable(hyp_file))
        return
    changed = [f"{key} {kept[key]} there, {read[key]} here" for key in kept if key in read and kept[key] != read[key]]
    if changed:
        logger.warning("%s has been edited (%s), but %s is read: edit that one", printable(record),
                       printable(", ".join(changed))[:500], printable(hyp_file))  # fmt: skip


def _folder_of_paths(started, run, data):
    """The folder that the relative paths of a run count from: where it was started, or where that has been moved to.

    `started` are the RUNTIME_KEYS of its opt.yaml, `run` is where its folder is now. A file of an earlier version does
    not say where it was started, but its save_dir counts from there. None when it cannot be told any more. Raises
    ValueError when it can be told and `data` is not there: elsewhere there may be a namesake with other images.
    """
    known, save_dir = started.get("working_dir"), started.get("save_dir") or ""
    for folder in filter(None, (known, _moved(known or "", save_dir, run))):
        if (Path(folder) / data).is_file() and os.path.isdir(folder):
            return Path(folder)
    if known and not Path(data).is_absolute():
        wanted = printable(os.path.join(known, data))
        raise ValueError(f"{run / 'opt.yaml'}: {wanted} does not exist; put it back, or correct "
                         "data or working_dir in that file")  # fmt: skip
    return None


def _moved(folder, save_dir, run):
    """Where `folder` is now, if a folder around it and the run was moved as a whole; "" if that cannot be told.

    The end that the old path of the run folder, folder/save_dir, and the new one share was moved.
    """
    old, new = list(Path(os.path.normpath(Path(folder, save_dir))).parts), list(run.parts)
    while old and new and old[-1] == new[-1]:
        old.pop(), new.pop()
    if not save_dir or not Path(folder).is_relative_to(Path(*old)):
        return ""
    return str(Path(*new, Path(folder).relative_to(Path(*old))))


def _found_from_here(data, run):
    """The data yaml of a run that does not say where it was started, or was started in a folder that is gone."""
    found = check_file(data)
    logger.warning("the folder where %s was started is not known or gone: what is relative, such as %s, counts from %s",
                   below(run, Path.cwd()), data, Path.cwd())  # fmt: skip
    return found


def _refuse_finished(checkpoint, opt, run):
    """Raise NothingToDo when the run in the folder `run` is over, unless it was killed before its very last steps."""
    state = resume.of(checkpoint) or {}
    is_stopped = early_stopping.is_due(state.get("best_epoch", -1), state.get("tested_epoch", -1), opt.patience)
    if checkpoint.epoch + 1 < opt.epochs and not is_stopped:
        return
    if state and checkpoint.path.name == "last.pt" and checkpoint.epoch < opt.epochs:  # not stripped yet
        logger.info("%s has had its epochs; what was left to do after them is done now", run)
        return
    if is_stopped and checkpoint.epoch + 1 < opt.epochs:
        raise NothingToDo(f"{run} was stopped by --patience {opt.patience} after epoch {checkpoint.epoch}; --resume "
                          "with a larger --patience goes on")  # fmt: skip
    raise NothingToDo(f"{run} has finished its {counted(opt.epochs, 'epoch')}; --resume with a larger --epochs goes on")


def newest_checkpoint() -> Path:
    """The last*.pt below the working directory that was written last; ValueError when there is none.

    A last_deploy.pt, from tools/reparameterize.py, holds no training.
    """
    found = [path for path in Path().glob("**/last*.pt") if path.is_file() and not path.stem.endswith("_deploy")]
    if not found:
        raise ValueError("--resume: there is no last.pt below the working directory; give its path")
    return max(found, key=lambda path: path.stat().st_ctime)
