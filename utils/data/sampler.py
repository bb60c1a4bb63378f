"""Which images a run draws: weights by class frequency, and by how badly a class scores (--image-weights)."""

import random

import numpy as np
import torch


def labels_to_class_weights(labels, num_classes):
    """Inverse class frequency, normalised to sum 1; a class without boxes counts as one box. [nc] float64 tensor.

    `labels` is the list of [n x 5: class, x, y, w, h] of all images.
    """
    classes = np.concatenate([rows[:, 0] for rows in labels]).astype(np.int64) if len(labels) else np.zeros(0, np.int64)
    counts = np.maximum(np.bincount(classes, minlength=num_classes), 1)
    return torch.from_numpy((1 / counts) / (1 / counts).sum())


def labels_to_image_weights(labels, num_classes, class_weights):
    """Sum over an image's boxes of the weight of their class, for every image; [num images]."""
    counts = [np.bincount(rows[:, 0].astype(np.int64), minlength=num_classes) for rows in labels]
    return (np.asarray(class_weights).reshape(1, -1) * np.array(counts).reshape(-1, num_classes)).sum(1)


def draw_image_indices(labels, class_weights, maps):
    """Indices of one epoch under --image-weights: n draws from n images, poor classes first.

    `class_weights` [nc] as attached to the model, `maps` [nc] the AP of each class in the last validation. Draws from
    Python's generator. Without any labelled image every image weighs the same.
    """
    num_classes = len(maps)
    poor = np.asarray(class_weights) * (1 - np.asarray(maps)) ** 2 / num_classes
    weights = labels_to_image_weights(labels, num_classes, poor)
    everything = range(len(labels))
    return random.choices(everything, weights=weights if weights.sum() > 0 else None, k=len(labels))
