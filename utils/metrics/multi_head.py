"""How well each head of a model with several detection heads does: the scores of its classes."""

from typing import NamedTuple

import numpy as np


class HeadScore(NamedTuple):
    """Scores of one head: means over those of its classes that have labels, 0 if none has."""

    name: str
    num_labels: int
    precision: float
    recall: float
    map50: float
    map: float


def heads_of(model):
    """[(name, class ids)] of the heads of `model`; empty if it has one head (or is an ensemble)."""
    layers = getattr(getattr(model, "module", model), "model", None)
    layer = layers[-1] if layers is not None else None
    return list(zip(layer.head_names, layer.head_classes, strict=True)) if hasattr(layer, "head_classes") else []


def score_heads(scores, heads):
    """A HeadScore for each of `heads` (name, class ids), from the `metrics.Scores` of all classes."""
    found = []
    for name, classes in heads:
        rows = np.isin(scores.classes, classes)
        columns = (scores.class_precision, scores.class_recall, scores.class_ap50, scores.class_ap)
        means = (float(column[rows].mean()) if rows.any() else 0.0 for column in columns)
        found.append(HeadScore(name, int(scores.labels_per_class[classes].sum()), *means))
    return found
