"""Images and videos to run a trained model on, letterboxed and ready for the network."""

import glob
import logging
import os
from pathlib import Path

import cv2
import numpy as np

from utils.data.images.reading import IMAGE_SUFFIXES, VIDEO_SUFFIXES, read_image
from utils.data.transforms import letterbox
from utils.system.files import printable

logger = logging.getLogger(__name__)


class LoadImages:
    """Iterates over a file, a folder or a glob pattern: images first, then the frames of the videos.

    Yields (path, uint8 [3 x h x w] RGB letterboxed, the original [H x W x 3] BGR, the open video or None). A file that
    cannot be read is skipped with a warning. Raises ValueError if there is nothing to read.
    """

    def __init__(self, path, img_size=640, stride=32):
        self.img_size = img_size
        self.stride = stride
        files = _matching_files(path)
        images = [file for file in files if _suffix(file) in IMAGE_SUFFIXES]
        videos = [file for file in files if _suffix(file) in VIDEO_SUFFIXES]
        if not images and not videos:
            raise ValueError(
                f"{printable(path)}: no images ({', '.join(IMAGE_SUFFIXES)}) or "
                f"videos ({', '.join(VIDEO_SUFFIXES)}) found"
            )
        self.files = images + videos
        self.num_images = len(images)
        self.nf = len(self.files)
        self.mode = "image"
        self.frame, self.nframes, self.cap = 0, 0, None

    def __len__(self):
        """Number of files."""
        return self.nf

    def __iter__(self):
        for i, path in enumerate(self.files):
            self.mode = "image" if i < self.num_images else "video"
            yield from self._image(path) if self.mode == "image" else self._frames(path)

    def _image(self, path):
        try:
            img = read_image(path)
        except ValueError as error:
            logger.warning("skipped: %s", error)
            return
        yield path, self._prepared(img), img, None

    def _frames(self, path):
        try:
            self.cap = cv2.VideoCapture(opencv_path(path))
        except ValueError as error:
            logger.warning("skipped: %s", error)
            return
        try:
            self.frame, self.nframes = 0, int(self.cap.get(cv2.CAP_PROP_FRAME_COUNT))
            has_frame, img = self.cap.read()
            if not has_frame:
                logger.warning("skipped: %s is not a readable video", path)
            while has_frame:
                self.frame += 1
                yield path, self._prepared(img), img, self.cap
                has_frame, img = self.cap.read()
        finally:
            self.cap.release()
            self.cap = None

    def _prepared(self, img):
        img = letterbox(img, self.img_size, stride=self.stride)[0]
        return np.stack(cv2.split(img)[::-1])  # BGR to RGB planes


def opencv_path(path):
    """`path` as OpenCV's videos take it: absolute, as 12:30.mp4 alone would be an address.

    ValueError for a name that is no UTF-8: OpenCV 4 and 5 crash at one.
    """
    text = os.path.abspath(path)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{printable(path)}: the name is no UTF-8, as OpenCV needs it; rename it") from error
    return text


def _suffix(path):
    return Path(path).suffix[1:].lower()


def _matching_files(path):
    """Sorted paths that a file name, a folder (not its sub-folders or hidden files) or a pattern (*, ?, []) names."""
    path = Path(os.path.expanduser(path)).absolute()
    if path.is_file():
        return [str(path)]
    if path.is_dir():
        return sorted(str(file) for file in path.glob("[!.]*") if file.is_file())
    if glob.has_magic(str(path)):
        fixed = next(folder for folder in path.parents if "*" not in str(folder) and folder.is_dir())
        return sorted(str(file) for file in fixed.glob(str(path.relative_to(fixed))) if file.is_file())
    raise ValueError(
        f"{printable(path)}: does not exist; give an image, a video, a folder, or a pattern such as folder/*.jpg"
    )
