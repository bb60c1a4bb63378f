"""Cameras and stream addresses: always the newest image of each, and a new connection when one is lost."""

import logging
import threading
import time
from collections.abc import Callable, Iterator

import cv2

from utils.detect.names import Frame, Item
from utils.detect.sources import COMPLETE, batches

logger = logging.getLogger(__name__)

RETRY_SECONDS = (0.5, 1, 2, 5, 10)  # before one try after the other; the last one for all further ones
TIMEOUT = 10_000  # milliseconds for a connection, and for an image


class StreamSource:
    """The newest frames of all streams, in batches of one shape; ends when `close` is called, or all files have ended.

    Raises ValueError when none of the streams can be opened. One that is lost is opened again, as long as it takes.
    """

    is_live = True

    def __init__(self, items: list[Item], prepare_image: Callable, batch_size: int = 1):
        self.items, self.prepare_image, self.batch_size = items, prepare_image, max(batch_size, len(items))
        self.news = threading.Condition()
        self.readers = [StreamReader(item, self.news) for item in items]
        for reader in self.readers:
            reader.start()
        for reader in self.readers:
            reader.tried.wait()
        if not any(reader.has_opened for reader in self.readers):
            self.close()
            labels = ", ".join(item.label for item in items)
            raise ValueError(f"--source {labels} cannot be opened: is the camera attached, the address right?")

    def __iter__(self) -> Iterator[list[Frame]]:
        while True:
            with self.news:
                while not (found := [reader.take() for reader in self.readers if reader.newest is not None]):
                    if not any(reader.is_alive() for reader in self.readers):
                        return
                    self.news.wait(0.2)  # so that Ctrl-C is heard
                self.news.notify_all()
            for frame in found:
                frame.pixels = self.prepare_image(frame.image)
            yield from batches(found, self.batch_size)

    def close(self) -> None:
        """Let all connections end."""
        for reader in self.readers:
            reader.ended.set()
        for reader in self.readers:
            reader.join(TIMEOUT / 1000)


class StreamReader(threading.Thread):
    """Reads one stream and keeps its newest image; of a file behind an http address each image, until it ends."""

    def __init__(self, item: Item, news: threading.Condition):
        super().__init__(name=item.label, daemon=True)
        self.item, self.news = item, news
        self.tried, self.ended = threading.Event(), threading.Event()
        self.has_opened = False
        self.capture, self.count = cv2.VideoCapture(), 0
        self.length, self.num_read = 0, 0  # images of this connection: all, if that is known, and those that were read
        self.newest: tuple | None = None  # image [h x w x 3, uint8, BGR], and when it came

    def connect(self) -> bool:
        """Open the stream; whether that was possible. Its own rate, if it tells one, becomes the item's."""
        path = self.item.path
        try:
            path.encode()  # OpenCV crashes at what is no UTF-8
            if path.isdecimal():
                self.capture = cv2.VideoCapture(int(path))
            else:
                limits = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, TIMEOUT, cv2.CAP_PROP_READ_TIMEOUT_MSEC, TIMEOUT]
                self.capture = cv2.VideoCapture(path, cv2.CAP_FFMPEG, limits)
        except (cv2.error, OverflowError, ValueError):  # no number of a camera, no address
            return False
        fps, length = self.capture.get(cv2.CAP_PROP_FPS), self.capture.get(cv2.CAP_PROP_FRAME_COUNT)
        self.item.fps = fps if 1 <= fps <= 240 else self.item.fps
        self.length = int(length) if path.lower().startswith("http") and 0 < length < 1e9 else 0
        self.num_read = 0
        return self.capture.isOpened()

    def run(self) -> None:
        self.has_opened = self.connect()
        self.tried.set()
        failures = 0
        while not self.ended.is_set():
            found, image = self.capture.read() if self.capture.isOpened() else (False, None)
            if found:
                if failures:
                    logger.info("%s is back", self.item.label)
                failures = 0
                self._keep(image)
                continue
            if self.length and self.num_read >= COMPLETE * self.length:
                break
            if self.ended.wait(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]):
                break
            if not failures:
                logger.warning("%s is lost; it is opened again when it comes back", self.item.label)
            failures += 1
            self.capture.release()
            self.connect()
        self.capture.release()

    def _keep(self, image):
        self.num_read += 1
        with self.news:
            while self.length and self.newest is not None and not self.ended.is_set():
                self.news.wait(0.2)
            self.newest = image, self.num_read / self.item.fps if self.length else time.monotonic()
            self.news.notify_all()

    def take(self):
        """A Frame of the newest image, which is then gone; `news` has to be held."""
        (image, seconds), self.newest = self.newest, None
        self.count += 1
        return Frame(self.item, image, number=self.count, is_last=False, seconds=seconds)
