"""Progressive resizing: the training size by epoch (--resize-schedule "0:320,20:480,40:640").

Everything that depends on the size follows at the first epoch of a stage: a new loader, whose mosaics and cached images
have the new size, and the gains of the losses. Anchors are pixels and stay, so that an object of a given number of
pixels is always the business of the same output; they are checked against the last size. Validation has the last size
from the beginning, so that all epochs compare.
"""

from collections.abc import Callable
from typing import NamedTuple

from utils.config.limits import SIDE

EXAMPLE = '"0:320,20:480,40:640" (first epoch : pixels)'


class ResizeStage(NamedTuple):
    """From epoch `start` on images of `size` pixels are trained."""

    start: int
    size: int


class ResizeSchedule(NamedTuple):
    """The training size in pixels of every epoch."""

    stages: tuple

    def at(self, epoch: int) -> int:
        return next(stage.size for stage in reversed(self.stages) if stage.start <= epoch)

    @property
    def final(self) -> int:
        return self.stages[-1].size

    def rounded(self, round_up: Callable[[int], int]) -> "ResizeSchedule":
        """The same stages, their sizes through `round_up(size)`."""
        return ResizeSchedule(tuple(ResizeStage(stage.start, round_up(stage.size)) for stage in self.stages))


def from_options(opt) -> ResizeSchedule:
    """The schedule of a run with these options; without --resize-schedule it has one stage."""
    return parse(opt.resize_schedule) if opt.resize_schedule else ResizeSchedule((ResizeStage(0, opt.img_size[0]),))


def parse(text: str) -> ResizeSchedule:
    """What --resize-schedule describes. Raises ValueError for anything else than stages in rising order."""
    try:
        stages = [ResizeStage(*map(int, part.split(":"))) for part in text.split(",")]
    except (TypeError, ValueError) as error:
        raise ValueError(f"--resize-schedule {text!r} is not understood; write it like {EXAMPLE}") from error
    starts = [stage.start for stage in stages]
    if starts[0] != 0 or starts != sorted(set(starts)):
        raise ValueError(f"--resize-schedule {text!r}: its epochs have to begin with 0 and to rise, as in {EXAMPLE}")
    SIDE.check(f"--resize-schedule {text!r}: size", [stage.size for stage in stages])
    return ResizeSchedule(tuple(stages))
