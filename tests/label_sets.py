"""Small data sets for the tests of the label scan."""

from pathlib import Path

from PIL import Image

from utils.data.image_list import img2label_paths

BOX = "0 0.5 0.5 0.4 0.4"
TRIANGLE = "1 0.1 0.1 0.3 0.1 0.3 0.3"


def make_dataset(folder, texts, images="images/train"):
    """A data set of 16 x 12 pictures whose label files hold `texts`: {stem: text, bytes, or None for no file}."""
    for stem, text in texts.items():
        image = folder / images / f"{stem}.jpg"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 12)).save(image)
        label = Path(img2label_paths([str(image)])[0])
        label.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            label.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder / images)
