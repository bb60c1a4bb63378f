"""Images and videos as batches of frames, decoded and letterboxed ahead of the network, in threads."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat, takewhile
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from utils.data.images.reading import check_jpeg_end, read_image
from utils.data.stream import opencv_path
from utils.data.transforms import letterbox
from utils.detect.names import Frame, Item, gif_is_complete
from utils.system.files import cause_of, stand_in
from utils.system.memory import keep_freed_memory

AHEAD = 16  # frames that are decoded before they are asked for, beyond a batch
WAITING = 4  # batches that may come before a frame that waits for others of its shape
COMPLETE = 0.9  # share of its frames without which a video counts as damaged; what a file tells is not exact


def prepare(image: np.ndarray, size: int, stride: int) -> np.ndarray:
    """The network's input [3 x h x w, uint8, RGB] of `image` [h x w x 3, BGR]: long side `size`, sides by `stride`."""
    boxed = letterbox(image, size, stride=stride)[0]
    return np.ascontiguousarray(boxed[..., ::-1].transpose(2, 0, 1))


class FileSource:
    """The frames of files, by `prepare_image`; yields batches of frames of one shape, and faults one by one.

    Batches overtake each other: `order` of a frame tells its place.
    """

    is_live = False

    def __init__(self, items: list[Item], prepare_image: Callable, batch_size: int = 1, workers: int | None = None):
        self.items, self.batch_size, self.prepare_image = items, batch_size, prepare_image
        self.workers = workers or min(16, os.cpu_count() or 1)

    def __iter__(self) -> Iterator[list[Frame]]:
        return batches(self._numbered(), self.batch_size)

    def _numbered(self):
        for order, frame in enumerate(self._frames()):
            frame.order = order
            yield frame

    def _frames(self):
        keep_freed_memory()
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
            check_jpeg_end(item.path)
            return Frame(item, image, self.prepare_image(image))
        except ValueError as error:
            return Frame(item, fault=f"{error}; skipped")
        except (MemoryError, cv2.error) as error:  # too large to be decoded or resized
            return Frame(item, fault=f"{item.label}: cannot be decoded ({cause_of(error)}); skipped")

    def _video(self, item):
        """Its frames, the last one marked as such; a fault at the end where there are no or too few."""
        previous, reason = None, ""
        try:
            for number, image in enumerate((_moving_image if item.path.lower().endswith(".gif") else _film)(item), 1):
                if previous is not None:
                    yield previous
                previous = Frame(item, image, self.prepare_image(image), number, is_last=False)
        except (ValueError, MemoryError, cv2.error) as error:
            reason = f" ({cause_of(error)})"
        read = previous.number if previous else 0
        if not read and os.path.isfile(item.path):
            with Path(item.path).open("rb") as file:
                kind = stand_in(file.read(256).decode("latin-1"))
            reason = f" ({kind})" if kind else reason
        if previous is not None:
            previous.is_last = read >= COMPLETE * item.num_frames and not reason
            yield previous
        if not read or not previous.is_last:
            total = f" of {item.num_frames}" * (item.num_frames > read)
            found = f"only {read}{total} frames can be read" if read else "no frame can be read"
            yield Frame(item, fault=f"{item.label}: {found}{reason}; it is damaged, or no video that OpenCV knows")


def _film(item):
    """The images [h x w x 3, uint8, BGR] of a video file."""
    capture = cv2.VideoCapture(opencv_path(item.path))
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
    """The images of a GIF; its rate is that of its first pause. ValueError where it is damaged."""
    try:
        with Image.open(item.path) as file:
            item.num_frames = file.n_frames
            item.fps = 1000 / (file.info.get("duration") or 100)
            for number in range(item.num_frames):
                file.seek(number)
                yield np.ascontiguousarray(np.asarray(file.convert("RGB"))[..., ::-1])
        if not gif_is_complete(item.path):
            raise ValueError("the rest is cut off")
    except Exception as error:  # Pillow answers broken files with nearly every exception class there is
        raise ValueError(cause_of(error)) from error


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

    A frame waits for others of its shape while fewer than WAITING * size later ones come. One with a fault is a batch.
    """
    waiting: dict[tuple, list[Frame]] = {}  # by shape; that of the oldest frame comes first
    for frame in frames:
        if frame.fault:
            yield [frame]
            continue
        shape = frame.pixels.shape
        waiting.setdefault(shape, []).append(frame)
        if len(waiting[shape]) >= size:
            yield waiting.pop(shape)
        if waiting and frame.order - next(iter(waiting.values()))[0].order >= WAITING * size:
            yield waiting.pop(next(iter(waiting)))
    yield from waiting.values()
