"""Loss items on their way from the device to the host, without ever making either wait (--fast-step).

The items of `interval` steps are collected in a block on the device, which is then copied to the host as a whole.
Whoever asks gets the items of those blocks that have arrived. Only at the end of an epoch is the rest waited for.
"""

import logging
import math
import time
from collections import deque
from dataclasses import dataclass, field

import torch

logger = logging.getLogger(__name__)

NUM_ITEMS = 4  # box, objectness, class, total
FEWEST_BAD_STEPS = 20  # in a row, before a run is given up


@dataclass
class Statistics:
    """How often blocks were read back, and how long was waited for them [seconds]."""

    blocks: int = 0
    steps: int = 0
    waited: float = 0.0
    longest: float = 0.0

    def scalars(self):
        return {
            "readback/blocks": self.blocks,
            "readback/waited_ms": 1e3 * self.waited,
            "readback/longest_wait_ms": 1e3 * self.longest,
        }

    def __str__(self):
        return (
            f"{self.steps} losses read back in {self.blocks} blocks, waited {self.waited:.3f} s in all, "
            f"{self.longest * 1e3:.1f} ms at most"
        )


@dataclass
class ItemsBlock:
    """The items of some steps, complete once `arrived` has happened (None: they are there)."""

    items: torch.Tensor  # [n x 4] on the host
    steps: list  # (iteration, paths) of each
    arrived: torch.cuda.Event | None = None


@dataclass
class NonFinite:
    """Notices losses that are inf or NaN: a warning for each block, an error when they do not end.

    With a scaled loss one step may overflow and does no harm: it is skipped. So only an unbroken row of `most` such
    steps stops the run.
    """

    most: int
    row: list = field(default_factory=list)  # (iteration, paths) of the latest steps, all of them bad

    def look_at(self, block):
        """Raises ValueError when the loss has not been finite for `most` steps in a row."""
        bad = (~block.items.isfinite().all(1)).tolist()
        if any(bad):
            steps = [step for step, is_bad in zip(block.steps, bad, strict=True) if is_bad]
            logger.warning("%s", describe(steps))
        for step, is_bad in zip(block.steps, bad, strict=True):
            self.row = [*self.row, step] if is_bad else []
            if len(self.row) >= self.most:
                raise ValueError(
                    f"the loss has not been finite for {self.most} steps in a row, since iteration {self.row[0][0]} "
                    f"({_files(self.row[0][1])}): lower lr0, train with --amp off, or look at the labels of these "
                    "files; the checkpoint of the last complete epoch is untouched"
                )


def describe(steps):
    """One sentence about the non-finite losses of `steps`, (iteration, paths) each."""
    iteration, paths = steps[0]
    others = f", and in {len(steps) - 1} more of the last steps" if len(steps) > 1 else ""
    return f"the loss was not finite in iteration {iteration} (images: {_files(paths)}){others}"


def _files(paths, most=4):
    rest = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(map(str, paths[:most])) + rest


class ReadBack:
    """Takes the loss items of every step and gives them back, in order, when they have arrived on the host."""

    def __init__(self, interval, device):
        self.interval, self.device = interval, device
        self.rows = torch.zeros(interval, NUM_ITEMS, device=device)
        self.steps, self.on_the_way = [], deque()
        self.statistics, self.non_finite = Statistics(), NonFinite(max(interval, FEWEST_BAD_STEPS))

    def add(self, items, iteration, paths):
        """Take the items [4] of one step; they may be overwritten afterwards, by later work of the same stream."""
        self.rows[len(self.steps)].copy_(items)
        self.steps.append((iteration, paths))
        if len(self.steps) == self.interval:
            self._send()

    def known(self):
        """The items [k x 4] that have arrived and were not given yet; waits for nothing."""
        arrived = []
        while self.on_the_way and (self.on_the_way[0].arrived is None or self.on_the_way[0].arrived.query()):
            arrived.append(self._receive())
        return torch.cat(arrived) if arrived else torch.zeros(0, NUM_ITEMS)

    def rest(self):
        """All items [k x 4] that were not given yet; waits for the device."""
        self._send()
        started = time.perf_counter()
        for block in self.on_the_way:
            if block.arrived is not None:
                block.arrived.synchronize()
        waited = time.perf_counter() - started
        self.statistics.waited += waited
        self.statistics.longest = max(self.statistics.longest, waited)
        return self.known()

    def _send(self):
        """Start the copy of the collected rows; a later step may write over them, because the stream keeps order."""
        if not self.steps:
            return
        rows, arrived = self.rows[: len(self.steps)], None
        items = torch.empty(rows.shape, pin_memory=rows.is_cuda).fill_(math.nan)
        items.copy_(rows, non_blocking=True)
        if rows.is_cuda:
            arrived = torch.cuda.Event(blocking=True)
            arrived.record()
        self.on_the_way.append(ItemsBlock(items, self.steps, arrived))
        self.statistics.blocks += 1
        self.statistics.steps += len(self.steps)
        self.steps = []

    def _receive(self):
        block = self.on_the_way.popleft()
        self.non_finite.look_at(block)
        return block.items
