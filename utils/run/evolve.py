"""Hyper-parameter search by mutation (--evolve): each generation trains once with a mutated copy of a good parent."""

import logging
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import yaml

from utils.config.hyp import HYPER_PARAMETERS
from utils.config.limits import SHARE
from utils.metrics.detection import fitness
from utils.plots.run import plot_evolution
from utils.system.files import atomic_write, counted, printable, read_text, split_lines

logger = logging.getLogger(__name__)

SCORES = ("P", "R", "mAP@.5", "mAP@.5:.95")
NUM_RESULTS = 7  # P, R, mAP@.5, mAP@.5:.95, val box, val obj, val cls


def evolve(train: Callable, hyp: dict, save_dir: str | Path, generations: int) -> dict:
    """Run `generations` trainings; `train(hyp) -> 7 results`. Returns the best hyper-parameters found.

    Writes into save_dir: evolve.txt (one row a generation, best first: 7 results, then the searched values in the order
    of their names in its first line), hyp_evolved.yaml and evolve.png. A generation that fails is recorded with fitness
    0 and does not end the search. Continues from an evolve.txt that is there already. Raises ValueError when the very
    first generation, which trains with the user's own values, does: no later one could do better.
    """
    hyp = dict(hyp)
    hyp.setdefault("anchors", 3)
    names = [name for name, row in HYPER_PARAMETERS.items() if row.mutation and name in hyp]
    table = Path(save_dir) / "evolve.txt"
    if earlier := len(read_table(table, names)):
        logger.info("The search goes on from the %s of %s", counted(earlier, "row"), printable(table))
    for generation in range(generations):
        rows = read_table(table, names)
        candidate = mutate(choose_parent(rows, names, hyp), names) if len(rows) else dict(hyp)
        logger.info("Generation %d of %d", generation + 1, generations)
        try:
            results = train(dict(candidate))
        except (RuntimeError, ValueError) as error:
            if isinstance(error, ValueError) and not len(rows):
                raise
            logger.warning("generation %d failed and scores 0: %s", generation + 1, error)
            results = (0.0,) * NUM_RESULTS
        add_row(table, results, candidate, names)
        save_best(table, names, hyp, Path(save_dir) / "hyp_evolved.yaml")
    rows = read_table(table, names)
    plot_evolution(rows, names, save_dir)
    return hyp | dict(zip(names, rows[0, NUM_RESULTS:].tolist(), strict=True))


def read_table(path, names):
    """Rows [n x (7 + number of names)] of an evolve.txt, best first; empty when there is none.

    Raises ValueError when the file searched other hyper-parameters, is damaged, or has a value that is out of range.
    """
    if not os.path.lexists(path):
        return np.zeros((0, NUM_RESULTS + len(names)))
    advice = "correct it, move it away or choose another --project"
    try:
        titles, *lines = split_lines(read_text(path).rstrip()) or [""]
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); {advice}") from error
    if titles.split()[1 + NUM_RESULTS :] != names:
        raise ValueError(f"{path} searched other hyper-parameters; move it away or choose another --project")
    rows = np.zeros((len(lines), NUM_RESULTS + len(names)))
    for index, line in enumerate(lines):
        where = f"{path}:{index + 2}"
        try:
            numbers = [float(word) for word in line.split()]
            if len(numbers) != rows.shape[1]:
                raise ValueError(f"{len(numbers)} numbers, its titles are {rows.shape[1]}")
        except ValueError as error:
            raise ValueError(f"{where} is damaged ({error}); {advice}") from error
        rows[index] = numbers
        if np.isnan(rows[index]).any() or not np.isfinite(fitness(rows[index : index + 1])).all():
            raise ValueError(f"{where} has a score that is no number; {advice}")
        for name, value in zip(SCORES, rows[index].tolist(), strict=False):
            SHARE.check(f"{where}: {name}", value)
        for name, value in zip(names, rows[index, NUM_RESULTS:].tolist(), strict=True):
            HYPER_PARAMETERS[name].range.check(f"{where}: {name}", value)
    return rows[np.argsort(-fitness(rows), kind="stable")]


def choose_parent(rows, names, hyp):
    """One of the five best rows, drawn with its lead over the worst of them as weight, as hyper-parameters."""
    best = rows[:5]
    scores = fitness(best)
    weights = scores - scores.min()
    row = random.choices(best, weights=weights if weights.sum() > 0 else None)[0]
    return hyp | dict(zip(names, row[NUM_RESULTS:].tolist(), strict=True))


def mutate(parent, names, probability=0.8, sigma=0.2):
    """A copy of `parent` whose `names` are multiplied by random factors of 0.3 to 3, then held within their limits."""
    rng = np.random.RandomState()  # not the training's stream, which each run starts from the same seed
    gains = np.array([HYPER_PARAMETERS[name].mutation[0] for name in names])
    factors = np.ones(len(names))
    while (factors == 1).all():
        mask = rng.random_sample(len(names)) < probability
        step = gains * mask * rng.standard_normal(len(names)) * rng.random_sample() * sigma
        factors = (step + 1).clip(0.3, 3.0)
    child = dict(parent)
    for name, factor in zip(names, factors, strict=True):
        _, low, high = HYPER_PARAMETERS[name].mutation
        child[name] = round(float(min(max(parent[name] * factor, low), high)), 5)
    return child


def add_row(path, results, hyp, names):
    """Add one row to evolve.txt, then put it in order: unique rows, best fitness first.

    The file is read again here, so that nothing is lost that was added to it while the generation trained.
    """
    new = [float(f"{value:.4g}") for value in results] + [float(f"{hyp[name]:.5g}") for name in names]
    rows = np.unique(np.vstack([read_table(path, names), np.nan_to_num(new)]), axis=0)
    rows = rows[np.argsort(-fitness(rows), kind="stable")]
    titles = ["#", *SCORES, "box", "obj", "cls", *names]
    lines = [" ".join(titles), *("".join(f"{value:>12.5g}" for value in row) for row in rows)]
    with atomic_write(path) as file:
        file.write(("\n".join(lines) + "\n").encode())


def save_best(table, names, hyp, path):
    """hyp_evolved.yaml: the best row so far, under a comment with its results."""
    best = read_table(table, names)[0]
    results = " ".join(f"{value:.4g}" for value in best[:NUM_RESULTS])
    with atomic_write(path, "w") as file:
        file.write(f"# P R mAP@.5 mAP@.5:.95 box obj cls: {results}\n")
        yaml.safe_dump(hyp | dict(zip(names, best[NUM_RESULTS:].tolist(), strict=True)), file, sort_keys=False)
