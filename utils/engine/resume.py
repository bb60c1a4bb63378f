"""What a checkpoint holds beyond stock's layout, so that a resumed run ends as if it had never been interrupted.

It lies under one key of its own, which stock tools ignore: weights and their average in full precision (stock's own
entries are rounded to half), how far the run has come, all random states, and the options and hyper-parameters that
were in force. Everything is a tensor, a number or text, so that the restricted reader takes it.
"""

import hashlib
import logging
from pathlib import Path

import numpy as np

from utils.config.flags import TRAIN_FLAGS
from utils.config.options import plain_values
from utils.engine.checkpoint import NEW_COPIES
from utils.system import random_state
from utils.system.distributed import gather_everywhere, unwrap
from utils.system.files import counted

logger = logging.getLogger(__name__)

KEY = "full_state"
KINDS = {
    "model": dict, "ema": dict, "accumulate": int, "results": list, "maps": list, "best_epoch": int,
    "tested_epoch": int, "random_states": list, "options": dict, "hyp": dict,
}  # fmt: skip
PLAIN = (str, int, float, list, dict, type(None))


def checkpoint(trainer, epoch, progress, results_text, opt, copies=NEW_COPIES):
    """The content of a checkpoint after `epoch`: stock's, and under KEY all that it lacks."""
    content = trainer.checkpoint(epoch, progress.best_fitness, results_text, copies)
    content[KEY] = {
        "model": copies.state(trainer.model),
        "ema": copies.state(trainer.ema.ema),
        "scheduler": {"last_epoch": trainer.scheduler.last_epoch},
        "accumulate": trainer.accumulate,
        "results": [float(value) for value in progress.results],
        "maps": [float(value) for value in progress.maps],
        "best_epoch": progress.best_epoch,
        "tested_epoch": progress.tested_epoch,
        "random_states": [random_state.capture(), *progress.random_states[1:]],
        "options": plain_values(opt),
        "images": progress.images,
        "hyp": dict(trainer.hyp),
    }
    return content


def of(stored):
    """What `checkpoint` added to a Checkpoint; None when it was written by another program.

    Raises ValueError when an entry is missing or of another type.
    """
    state = stored.extra.get(KEY)
    if not isinstance(state, dict):
        return None
    wrong = [key for key, kind in KINDS.items() if not isinstance(state.get(key), kind)]
    wrong = wrong or [key for key in ("options", "hyp") if not all(isinstance(v, PLAIN) for v in state[key].values())]
    wrong = wrong or [key for key in ("results", "maps") if not all(isinstance(v, (int, float)) for v in state[key])]
    if wrong or state["accumulate"] < 1:
        raise ValueError(
            f"{stored.path}: its full state is damaged or of another version ({(*wrong, 'accumulate')[0]})"
        )
    return state


def restore(stored, trainer, progress, opt):
    """Complete what Trainer.restore took from stock's entries of the Checkpoint `stored`.

    Rates, weight decay and accumulation are those of the present options: a changed batch size or number of epochs
    takes effect at once. Raises ValueError when the state does not fit the model.
    """
    state = of(stored)
    progress.random_states = []
    if state is None:
        logger.info("%s holds no full state: weights go on from half precision, random streams anew", stored.path)
        return
    wrong = [name for name in ("results", "maps") if len(state[name]) != len(getattr(progress, name))]
    try:
        if wrong:
            raise TypeError(f"{wrong[0]} of another length")
        unwrap(trainer.model).load_state_dict(state["model"])
        trainer.ema.ema.load_state_dict(state["ema"])
        trainer.resume_schedule(stored.epoch)
        if state["options"].get("total_batch_size") == opt.total_batch_size:
            trainer.accumulate = state["accumulate"]
        progress.results, progress.maps = tuple(state["results"]), np.array(state["maps"], dtype=np.float64)
        progress.best_epoch, progress.tested_epoch = state["best_epoch"], state["tested_epoch"]
        progress.random_states = state["random_states"]
        progress.images = state.get("images")  # not in older files
    except (TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{stored.path}: its full state is damaged or of another version ({error})") from error
    _report_changes(state, trainer.hyp, opt)


def note_images(progress, img_files, opt):
    """Remember how many images are trained on and, as a digest, which; say it when a resumed run had others.

    With --strict-data it is a ValueError. An image is known by its own name and that of its folder, so that the data
    set may move. ValueError when the processes have different ones: their epochs would not end together.
    """
    digest = hashlib.sha256()
    for name in sorted("/".join(Path(file).parts[-2:]) for file in img_files):
        digest.update(name.encode("utf-8", "surrogateescape") + b"\n")
    before, progress.images = progress.images, {"count": len(img_files), "digest": digest.hexdigest()[:16]}
    _check_same_everywhere(progress.images, opt)
    if not isinstance(before, dict) or before == progress.images:
        return
    problem = (
        f"{opt.data}: the training set has {len(img_files)} images, and had {before.get('count')} when the checkpoint "
        "was written; they are not the same"
    )
    if opt.strict_data:
        raise ValueError(f"--strict-data: {problem}. Bring the others back, or leave the flag out to go on")
    logger.warning("%s; the run goes on with those that are there", problem)


def _check_same_everywhere(images, opt):
    everywhere = gather_everywhere(images)
    for rank, there in enumerate(everywhere):
        if there != everywhere[0]:
            raise ValueError(
                f"{opt.data}: rank 0 trains on {everywhere[0]['count']} images, rank {rank} on {there['count']}; they "
                "are not the same, and every machine needs all files of the data set"
            )


def _word(value):
    """The value of an option in a message."""
    return " ".join(map(str, value)) if isinstance(value, list) else "none" if value in (None, "") else str(value)


def _report_changes(state, hyp, opt):
    """Say which options and hyper-parameters are not those that the checkpoint was written with."""
    before, now = state["options"], vars(opt)
    names = [name for name, flag in TRAIN_FLAGS.items() if flag.is_reported and name != "batch_size"]
    names += ["total_batch_size", "world_size"]  # batch_size itself is the share of one process
    names = [name for name in names if before.get(name, now[name]) != now[name]]
    changed = [f"{name} {_word(before[name])} -> {_word(now[name])}" for name in names]
    num_states, num_ranks = len(state["random_states"]), opt.world_size
    if num_states != num_ranks:
        logger.info("Random streams begin anew, from rank and epoch: the checkpoint has those of %s, this run has %d",
                    counted(num_states, "process", "processes"), num_ranks)  # fmt: skip
    if changed:
        logger.info("Changed since the checkpoint: %s", ", ".join(changed))
    names = sorted(name for name in hyp.keys() | state["hyp"].keys() if hyp.get(name) != state["hyp"].get(name))
    if names:
        pairs = [f"{name} {state['hyp'].get(name, 'absent')} -> {hyp.get(name, 'absent')}" for name in names]
        logger.warning("%s has changed since the checkpoint, and holds from now on: %s", opt.hyp, ", ".join(pairs))
