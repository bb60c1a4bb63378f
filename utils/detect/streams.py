"""Cameras and stream addresses: always the newest image of each, and a new connection when one is lost."""

import logging
import threading
import time
from collections.abc import Callable, Iterator

import cv2

from utils.detect.names import Frame, Item
from utils.detect.sources import batches

logger = logging.getLogger(__name__)

RETRY_SECONDS = (0.5, 1, 2, 5, 10)  # before one try after the other; the last one for all further ones
TIMEOUT = 10_000  # milliseconds for a connection, and for an image


class StreamSource:
    """The newest frames of all streams, in batches of one shape; ends when `close` is called.

    Raises ValueError when none of the streams can be opened. One that is lost is opened again, as long as it takes.
    """

    is_live = True

    def __init__(self, items: list[Item], prepare_image: Callable, batch_size: int = 1):
        self.items, self.prepare_image, self.batch_size = items, prepare_image, max(batch_size, len(items))
        self.news = threading.Condition()
        self.readers = [StreamReader(item, self.news) for item in items]
        if not any(reader.connect() for reader in self.readers):
            labels = ", ".join(item.label for item in items)
            raise ValueError(f"--source {labels} cannot be opened: is the camera attached, the address right?")
        for reader in self.readers:
            reader.start()

    def __iter__(self) -> Iterator[list[Frame]]:
        while True:
            with self.news:
                while not (found := [reader.take() for reader in self.readers if reader.newest is not None]):
                    if not any(reader.is_alive() for reader in self.readers):
                        return
                    self.news.wait(0.2)  # so that Ctrl-C is heard
            for frame in found:
                frame.pixels = self.prepare_image(frame.image)
            yield from batches(found, self.batch_size)

    def close(self) -> None:
        """Let all connections end."""
        for reader in self.readers:
            reader.ended.set()
        for reader in self.readers:
            if reader.ident is not None:
                reader.join(TIMEOUT / 1000)


class StreamReader(threading.Thread):
    """Reads one stream and keeps its newest image."""

    def __init__(self, item: Item, news: threading.Condition):
        super().__init__(name=item.label, daemon=True)
        self.item, self.news, self.ended = item, news, threading.Event()
        self.capture, self.count = cv2.VideoCapture(), 0
        self.newest: tuple | None = None  # image [h x w x 3, uint8, BGR], and when it came

    def connect(self) -> bool:
        """Open the stream; whether that was possible. Its own rate, if it tells one, becomes the item's."""
        if self.item.path.isdigit():
            self.capture = cv2.VideoCapture(int(self.item.path))
        else:
            limits = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, TIMEOUT, cv2.CAP_PROP_READ_TIMEOUT_MSEC, TIMEOUT]
            self.capture = cv2.VideoCapture(self.item.path, cv2.CAP_FFMPEG, limits)
        fps = self.capture.get(cv2.CAP_PROP_FPS)
        self.item.fps = fps if 1 <= fps <= 240 else self.item.fps
        return self.capture.isOpened()

    def run(self) -> None:
        failures = 0
        while not self.ended.is_set():
            found, image = self.capture.read() if self.capture.isOpened() else (False, None)
            if found:
                if failures:
                    logger.info("%s is back", self.item.label)
                failures = 0
                with self.news:
                    self.newest = image, time.monotonic()
                    self.news.notify()
                continue
            if not failures:
                logger.warning("%s is lost; it is opened again when it comes back", self.item.label)
            self.ended.wait(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
            failures += 1
            self.capture.release()
            if not self.ended.is_set():
                self.connect()
        self.capture.release()

    def take(self):
        """A Frame of the newest image, which is then gone; `news` has to be held."""
        (image, seconds), self.newest = self.newest, None
        self.count += 1
        return Frame(self.item, image, number=self.count, is_last=False, seconds=seconds)
