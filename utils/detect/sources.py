"""Images and videos as batches of frames, decoded and letterboxed ahead of the network, in threads."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat, takewhile

import cv2
import numpy as np
from PIL import Image

from utils.data.images.reading import read_image
from utils.data.transforms import letterbox
from utils.detect.names import Frame, Item

AHEAD = 16  # frames that are decoded before they are asked for, beyond a batch
WAITING = 4  # batches of images that may wait for others of their shape
COMPLETE = 0.9  # share of its frames without which a video counts as damaged; what a file tells is not exact


def prepare(image: np.ndarray, size: int, stride: int) -> np.ndarray:
    """The network's input [3 x h x w, uint8, RGB] of `image` [h x w x 3, BGR]: long side `size`, sides by `stride`."""
    boxed = letterbox(image, size, stride=stride)[0]
    return np.ascontiguousarray(boxed[..., ::-1].transpose(2, 0, 1))


class FileSource:
    """The frames of files, by `prepare_image`; yields batches of frames of one shape, and faults one by one."""

    is_live = False

    def __init__(self, items: list[Item], prepare_image: Callable, batch_size: int = 1, workers: int | None = None):
        self.items, self.batch_size, self.prepare_image = items, batch_size, prepare_image
        self.workers = workers or min(16, os.cpu_count() or 1)

    def __iter__(self) -> Iterator[list[Frame]]:
        return batches(self._frames(), self.batch_size)

    def _frames(self):
        images = [item for item in self.items if item.kind == "image"]
        depth = self.batch_size + AHEAD
        with ThreadPoolExecutor(self.workers, "decode") as pool:
            yield from _in_order(pool, (partial(self._read, item) for item in images), depth)
        for item in self.items[len(images) :]:
            video = self._video(item)
            with ThreadPoolExecutor(1, "decode") as pool:  # each of its tasks reads the next frame
                calls = _in_order(pool, repeat(partial(next, video, None)), depth)
                yield from takewhile(lambda frame: frame is not None, calls)

    def _read(self, item):
        try:
            image = read_image(item.path)
        except ValueError as error:
            return Frame(item, fault=f"{error}; skipped")
        return Frame(item, image, self.prepare_image(image))

    def _video(self, item):
        """Its frames, the last one marked as such; a fault at the end where there are no or too few."""
        previous = None
        for number, image in enumerate((_moving_image if item.path.lower().endswith(".gif") else _film)(item), 1):
            if previous is not None:
                yield previous
            previous = Frame(item, image, self.prepare_image(image), number, is_last=False)
        read = previous.number if previous else 0
        if previous is not None:
            previous.is_last = read >= COMPLETE * item.num_frames
            yield previous
        if not read or not previous.is_last:
            found = f"only {read} of {item.num_frames} frames can be read" if read else "no frame can be read"
            yield Frame(item, fault=f"{item.label}: {found}; it is damaged, or no video that OpenCV knows")


def _film(item):
    """The images [h x w x 3, uint8, BGR] of a video file."""
    capture = cv2.VideoCapture(item.path)
    try:
        fps, count = capture.get(cv2.CAP_PROP_FPS), capture.get(cv2.CAP_PROP_FRAME_COUNT)
        item.fps = fps if 0 < fps < 1000 else item.fps  # damaged files tell nonsense, and NaN
        item.num_frames = int(count) if 0 < count < 1e9 else 0
        while True:
            found, image = capture.read()
            if not found:
                return
            yield image
    finally:
        capture.release()


def _moving_image(item):
    """The images of a GIF; its rate is that of its first pause."""
    with Image.open(item.path) as file:
        item.num_frames = file.n_frames
        item.fps = 1000 / (file.info.get("duration") or 100)
        for number in range(item.num_frames):
            try:
                file.seek(number)
                image = np.asarray(file.convert("RGB"))
            except (OSError, EOFError, ValueError):  # cut off
                return
            yield np.ascontiguousarray(image[..., ::-1])


def _in_order(pool, calls, depth):
    """The results of `calls` in their order, `depth` of them made ahead."""
    pending: deque = deque()
    try:
        for call in calls:
            pending.append(pool.submit(call))
            if len(pending) > depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def batches(frames: Iterable[Frame], size: int) -> Iterator[list[Frame]]:
    """Batches of at most `size` frames of one shape, so that what is found does not depend on the neighbours.

    With size 1 in the order of the frames; else an image may be late, by a few batches, but the frames of a video stay
    in order and no other item comes between them. A frame with a fault is a batch of its own.
    """
    waiting: dict[tuple, list[Frame]] = {}
    current = None
    for frame in frames:
        if frame.item is not current and "video" in (frame.item.kind, current and current.kind):
            yield from waiting.values()
            waiting = {}
        current = frame.item
        if frame.fault:
            if frame.item.kind == "video":
                yield from waiting.values()
                waiting = {}
            yield [frame]
            continue
        shape = frame.pixels.shape
        waiting.setdefault(shape, []).append(frame)
        if sum(map(len, waiting.values())) >= WAITING * size:
            shape = max(waiting, key=lambda key: len(waiting[key]))
        if len(waiting[shape]) >= size or sum(map(len, waiting.values())) >= WAITING * size:
            yield waiting.pop(shape)
    yield from waiting.values()
