"""Small data sets for the tests of the label scan, and labels of which each has a polygon."""

from pathlib import Path

import numpy as np
from PIL import Image

from utils.data.labels.image_list import img2label_paths

BOX = "0 0.5 0.5 0.4 0.4"
TRIANGLE = "1 0.1 0.1 0.3 0.1 0.3 0.3"


def make_dataset(folder, texts, images="images/train"):
    """A data set of 16 x 12 images whose label files hold `texts`: {stem: text, bytes, or None for no file}."""
    for stem, text in texts.items():
        image = folder / images / f"{stem}.jpg"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 12)).save(image)
        label = Path(img2label_paths([str(image)])[0])
        label.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            label.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder / images)


def mixed_labels():
    """(labels [12 x 5: class 0 to 11, x1, y1, x2, y2 in pixels], a triangle [3 x 2] that fills each box)."""
    rng = np.random.default_rng(2)
    corner = rng.uniform(0, 90, (12, 2))
    labels = np.concatenate((np.arange(12)[:, None], corner, corner + rng.uniform(8, 40, (12, 2))), axis=1)
    labels = labels.astype(np.float32)
    polygons = [
        np.array([[x1, y1], [x2, y1], [(x1 + x2) / 2, y2]], np.float32) for x1, y1, x2, y2 in labels[:, 1:].tolist()
    ]
    return labels, polygons
