"""Make a head configuration (--head-config) from a data set: which detection head learns which classes.

    python tools/group_classes.py --data data/coco320.yaml --heads 4 --by shape --out my_heads.yaml

    --by shape  classes whose boxes are alike in size and proportion share a head: SciPy's k-means
    --by count  every head gets about the same number of boxes: the most frequent class first, each to the head that has
                the fewest

A class without boxes goes to the head with the fewest classes. Equal data and --seed give equal groups.
"""

import argparse
import logging
import sys
import warnings
from pathlib import Path

import numpy as np
import yaml
from scipy.cluster.vq import kmeans2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils.config.data_yaml import load_data_yaml
from utils.data.labels.scan import check_class_ids, scan_dataset
from utils.head_config import HeadConfig
from utils.run import entry
from utils.system.files import atomic_write, check_replaceable, printable

logger = logging.getLogger("group_classes")

HEADLINE = "# --head-config:"  # of what is written here

RESTARTS = 20  # of k-means; the best one counts
MAX_SEED = 2**32 - RESTARTS  # each start has a seed of its own, of NumPy


def box_statistics(scanned, nc):
    """Per class the number of boxes [nc], and mean logarithms of their area and proportion [nc x 2, 0 without boxes].

    The area is the share of the image, the proportion width by height in pixels.
    """
    rows = [np.zeros((0, 3))]
    for labels, (width, height) in zip(scanned.labels, scanned.shapes, strict=True):
        boxes = labels[(labels[:, 3:5] > 0).all(1)].astype(np.float64)
        w, h = boxes[:, 3], boxes[:, 4]
        rows.append(np.stack((boxes[:, 0], np.log(w * h), np.log(w * width / (h * height))), 1))
    rows = np.concatenate(rows)
    classes = rows[:, 0].astype(int)
    counts = np.bincount(classes, minlength=nc)
    sums = np.stack([np.bincount(classes, weights=column, minlength=nc) for column in rows[:, 1:].T], 1)
    return counts, sums / np.maximum(counts, 1)[:, None]


def group_by_shape(counts, shapes, num_heads, seed=0):
    """Class ids of each head, such that classes with similar `shapes` [nc x 2] share one."""
    seen = np.flatnonzero(counts)
    spread = shapes[seen].std(0)
    points = (shapes[seen] - shapes[seen].mean(0)) / np.where(spread > 0, spread, 1.0)
    label = k_means(points, min(num_heads, len(np.unique(points, axis=0))), seed)
    groups = [seen[label == head].tolist() for head in range(num_heads)]
    for group in groups:  # equal shapes leave a head without classes
        if not group:
            group.append(max(groups, key=len).pop())
    return groups


def k_means(points, k, seed):
    """Which of `k` clusters each of `points` [n x d] belongs to [n]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a cluster that became empty; another start does better
        runs = [kmeans2(points, k, minit="++", seed=seed + start) for start in range(RESTARTS)]
    inertias = [((points - centres[label]) ** 2).sum() for centres, label in runs]
    return runs[int(np.argmin(inertias))][1]


def group_by_count(counts, num_heads):
    """Class ids of each head, such that the heads have about equally many boxes."""
    groups, totals = [[] for _ in range(num_heads)], [0] * num_heads
    for c in np.argsort(-counts, kind="stable").tolist():
        if counts[c]:
            head = int(np.argmin(totals))
            groups[head].append(c)
            totals[head] += int(counts[c])
    return groups


def make_groups(counts, shapes, num_heads, by, seed=0):
    """Sorted class ids of each head; every class is in one. ValueError if there are too few classes with boxes."""
    num_seen = int((counts > 0).sum())
    if num_seen < num_heads:
        raise ValueError(f"--heads {num_heads}: only {num_seen} classes have boxes; every head needs one of them")
    groups = group_by_shape(counts, shapes, num_heads, seed) if by == "shape" else group_by_count(counts, num_heads)
    for c in np.flatnonzero(counts == 0).tolist():
        min(groups, key=len).append(c)
    return [sorted(group) for group in sorted(groups, key=min)]


def describe(groups, counts, names, by):
    """The content of the head configuration."""
    total = max(int(counts.sum()), 1)
    heads = {}
    for head, classes in enumerate(groups):
        number = int(counts[classes].sum())
        most = sorted(classes, key=lambda c: -counts[c])[:3]
        heads[f"head_{head}"] = {
            "name": ", ".join(names[c] for c in most) + (", ..." if len(classes) > 3 else ""),
            "weight": 1.0,
            "sample_count": number,
            "sample_ratio": round(number / total, 4),
            "classes": classes,
        }
    return {"nc": len(counts), "heads": len(groups), "grouping": f"by {by}", "full_head": False,
            "head_assignments": heads}  # fmt: skip


def main(opt):
    if opt.heads < 1:
        raise ValueError(f"--heads {opt.heads} has to be at least 1")
    if not 0 <= opt.seed <= MAX_SEED:
        raise ValueError(f"--seed {opt.seed} has to be between 0 and {MAX_SEED}")
    check_replaceable(opt.out, "--out", (".yaml", ".yml"), [opt.data], HEADLINE.encode())
    data = load_data_yaml(opt.data, needed=("train",))
    scanned = scan_dataset(data.train, "train: ", data.keypoints)
    check_class_ids(scanned.labels, scanned.label_files, data.nc, data.names)
    counts, shapes = box_statistics(scanned, data.nc)
    content = describe(make_groups(counts, shapes, opt.heads, opt.by, opt.seed), counts, data.names, opt.by)
    Path(opt.out).parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(opt.out, "w", encoding="utf-8") as file:
        file.write(f"{HEADLINE} the classes of {printable(opt.data)} by the {opt.by} of their boxes.\n")
        yaml.safe_dump(content, file, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)
    logger.info("%s", HeadConfig(opt.out).summary())


def parser():
    parser = argparse.ArgumentParser("group_classes.py", description="Divide the classes of a data set among heads.")
    add = parser.add_argument
    add("--data", required=True, help="data set yaml; its train split is read")
    add("--heads", type=int, default=4, help="number of heads")
    add("--by", default="shape", choices=("shape", "count"), help="alike boxes together, or equally many boxes a head")
    add("--out", default="heads.yaml", help="the file to write")
    add("--seed", type=int, default=0, help="of k-means")
    return parser


if __name__ == "__main__":
    entry.run(main, parser().parse_args())
