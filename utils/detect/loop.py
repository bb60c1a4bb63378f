"""One detection from its first image to its last line: batches, writers, a progress bar, one line a file."""

import logging
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import cv2
from tqdm import tqdm

from utils.detect.names import Frame
from utils.detect.predict import Predictor, to_original
from utils.detect.writers import Pictures, counts_text
from utils.system.files import counted, folded
from utils.system.progress import progress

logger = logging.getLogger(__name__)


@dataclass
class Outcome:
    """What came of a detection: images done, detections by class id, faults; seconds in all and in the network."""

    images: int = 0
    classes: Counter = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0
    inference: float = 0.0
    interrupted: KeyboardInterrupt | None = None

    def summary(self, names: Sequence) -> str:
        """The last line."""
        rate = self.images / self.seconds if self.seconds else 0
        found = counts_text(list(self.classes.elements()), names)
        each = 1e3 * self.inference / max(self.images, 1)
        state = "Interrupted" if self.interrupted else "Done"
        images = counted(self.images, "image")
        return f"{state}: {images} in {self.seconds:.1f} s ({rate:.1f} img/s, network and NMS {each:.1f} ms): {found}"


class Window:
    """Shows frames with their boxes (--view-img)."""

    def __init__(self, pictures: Pictures):
        self.pictures = pictures
        check_window()

    def show(self, frame: Frame, detections) -> bool:
        """Show a frame; whether the key q was pressed."""
        cv2.imshow(frame.item.label, self.pictures.draw(frame, detections))
        return cv2.waitKey(1) == ord("q")


def quiet_decoders() -> None:
    """Let OpenCV, FFmpeg and Pillow print nothing of their own: what is wrong with a file is said here, once."""
    warnings.filterwarnings("ignore", module="PIL")
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")  # heard when the first video is opened
    set_level = getattr(cv2, "setLogLevel", None) or cv2.utils.logging.setLogLevel  # OpenCV 4, or 5
    set_level(0)


def check_window() -> None:
    """Raise ValueError where no window can be opened."""
    gui = next(
        (line for line in cv2.getBuildInformation().splitlines() if line.strip().startswith("GUI:")), "GUI: NONE"
    )
    if "NONE" in gui:
        raise ValueError(
            "--view-img: this OpenCV has no windows; pip install opencv-python instead of the headless one"
        )
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise ValueError("--view-img: there is no display; leave it out, the images are saved")


def detect(
    source: Iterable[list[Frame]], predictor: Predictor, names: Sequence, writers: Sequence, *, num_items: int,
    window: Window | None = None,
) -> Outcome:  # fmt: skip
    """Detect in all batches of `source`, hand every frame to `writers`; closes them, after Ctrl-C as well."""
    outcome, start = Outcome(), time.perf_counter()
    live = getattr(source, "is_live", False)
    bar = progress(total=None if live else num_items, unit="img", desc="detect")
    lines, in_order = Lines(names, bar), InOrder()

    def hand_on(results):
        for frame, detections, seconds in results:
            if frame.fault:
                outcome.faults.append(frame.fault)
                lines.warn(frame.fault)
                continue
            outcome.images += 1
            outcome.classes.update(map(int, detections[:, 5].tolist()))
            for writer in writers:
                writer.add(frame, detections)
            lines.add(frame, detections, seconds)
            if window and window.show(frame, detections):
                raise _Closed

    with ExitStack() as stack:
        stack.callback(bar.close)
        for writer in writers:
            stack.callback(writer.close)
        try:
            for batch in source:
                results = _results(batch, predictor)
                outcome.inference += sum(seconds for *_, seconds in results)
                hand_on(in_order.add(results))
        except KeyboardInterrupt as interruption:
            outcome.interrupted = interruption.with_traceback(None)
            hand_on(in_order.rest())
        except _Closed:
            pass
        finally:
            if live:
                source.close()  # type: ignore[attr-defined]
            outcome.seconds = time.perf_counter() - start
    return outcome


class _Closed(Exception):
    """The key q was pressed in the window."""


def _results(batch, predictor):
    """(frame, its detections in pixels of the image, seconds) for each frame of a batch; no detections of a fault."""
    if batch[0].fault:
        return [(batch[0], None, 0.0)]
    start = time.perf_counter()
    found = predictor([frame.pixels for frame in batch])
    each = (time.perf_counter() - start) / len(batch)
    return [
        (frame, to_original(rows, frame.pixels.shape[1:], frame.image.shape), each)
        for frame, rows in zip(batch, found, strict=True)
    ]


class InOrder:
    """Results in the order of the files, as batches of one shape overtake each other; of streams as they come."""

    def __init__(self) -> None:
        self.early: dict[int, tuple] = {}
        self.due = 0

    def add(self, results: Sequence[tuple]) -> Iterator[tuple]:
        """Those of `results`, which begin with a Frame, and of earlier ones whose turn it is."""
        for result in results:
            if result[0].order < 0:
                yield result
            else:
                self.early[result[0].order] = result
        while self.due in self.early:
            self.due += 1
            yield self.early.pop(self.due - 1)

    def rest(self) -> Iterator[tuple]:
        """What is left when an earlier one will not come any more."""
        while self.early:
            yield self.early.pop(min(self.early))


class Lines:
    """One line for each file, when it is done; what is printed does not tear the progress bar."""

    def __init__(self, names: Sequence, bar: tqdm):
        self.names, self.bar = names, bar
        self.class_ids: list[float] = []  # of the video that is being read
        self.frames, self.seconds = 0, 0.0

    def add(self, frame: Frame, detections, seconds: float) -> None:
        item, ids = frame.item, detections[:, 5].tolist()
        if item.kind == "video" and frame.number == 1 and self.bar.total is not None:
            self.bar.total += max(item.num_frames - 1, 0)
        self.bar.update()
        if item.kind == "stream":
            self.bar.set_postfix_str(f"{item.position}: {counts_text(ids, self.names)}", refresh=False)
            return
        self.class_ids, self.frames, self.seconds = self.class_ids + ids, self.frames + 1, self.seconds + seconds
        if frame.is_last or item.kind == "image":
            height, width = frame.image.shape[:2]
            frames = f" {counted(self.frames, 'frame')}" if item.kind == "video" else ""
            found, each = counts_text(self.class_ids, self.names), 1e3 * self.seconds / self.frames
            name = f"{item.kind} {item.position} {item.label}:"
            result = f"{width}x{height}{frames} {found}, {each:.1f} ms"
            line = folded(f"{name} {result}")  # whose name stays whole
            logger.info("%s", line if "\n" not in line else f"{name}\n{folded(f'    {result}')}")
            self.class_ids, self.frames, self.seconds = [], 0, 0.0

    def warn(self, fault: str) -> None:
        self.bar.update()
        self.class_ids, self.frames, self.seconds = [], 0, 0.0
        logger.warning("%s", fault)
