"""The time that training takes, as every rate of a run counts it."""

import time


class TrainingClock:
    """Images and seconds of the training part of epochs, without compilation, validation and files.

    `world_size` is the number of processes that train, of which this one sees its share of the images. Of the present
    epoch: `started` and `trained` (the end so far) in time.monotonic() and `num_images`; `total_images` and
    `total_seconds` are those of the epochs that have ended.
    """

    def __init__(self, world_size: int = 1):
        self.world_size = world_size
        self.total_images, self.total_seconds = 0, 0.0
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self.started = self.trained = time.monotonic()
        self.num_images = 0

    def exclude(self, seconds: float) -> None:
        """Leave what happened in the last `seconds` out of the epoch."""
        self.started += seconds

    def batch(self, num_images: int) -> None:
        """A batch of this process has been trained."""
        self.num_images += num_images * self.world_size
        self.trained = time.monotonic()

    def end_training(self) -> None:
        """The training part of the epoch ends here, with the last batch or later."""
        self.trained = time.monotonic()
        self.total_images += self.num_images
        self.total_seconds += self.seconds

    @property
    def seconds(self) -> float:
        """Of the present epoch."""
        return self.trained - self.started

    @property
    def rate(self) -> float:
        """Images a second in the present epoch; 0 before the first one."""
        return self.num_images / self.seconds if self.num_images and self.seconds > 0 else 0.0

    @property
    def total_rate(self) -> float:
        """Images a second in all epochs that have ended; 0 before the first one."""
        return self.total_images / self.total_seconds if self.total_seconds > 0 else 0.0


def per_second(rate: float) -> str:
    """A rate in images a second, as `44 img/s` or `4.4 img/s`."""
    return f"{rate:.0f} img/s" if rate >= 10 else f"{rate:.1f} img/s"
