"""Instruments around a real training run: where the time of a step goes, and what the machine does meanwhile."""

import os
import threading
import time
from collections import defaultdict
from contextlib import suppress
from typing import NamedTuple

import pynvml
import torch

from tools.bench_loader import children, cpu_seconds
from utils.data.fast.device_augment import DeferredBatch

PHASES = ("data", "copy", "forward", "loss", "backward", "optimiser", "EMA", "graph", "exchange", "read-back",
          "other")  # fmt: skip


# Steps of a stage, even if they take longer; the first ones look for kernels, and then a graph may be captured.
FEWEST = {"warm-up": 12}


class Done(Exception):
    """Enough steps have been measured."""


class Timeline:
    """Cuts the time of the main process into phases: `mark(name)` ends one and begins the next.

    On a GPU the cuts are events of the current stream, so a phase lasts from the end of the work that was queued before
    it to the end of its own, and waiting for the host counts; `host` times are kept beside.
    """

    def __init__(self, device):
        self.is_cuda, self.is_on, self.cuts = device.type == "cuda", False, []

    def mark(self, name):
        if not self.is_on or (self.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        event = None
        if self.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.cuts.append((name, time.perf_counter(), event))

    def around(self, function, name, then="other"):
        """`function`, whose calls are the phase `name`; afterwards begins `then`."""

        def timed(*args, **kwargs):
            self.mark(name)
            try:
                return function(*args, **kwargs)
            finally:
                self.mark(then)

        return timed

    def milliseconds(self, num_steps):
        """Two dicts, phase -> ms a step: on the device (on a CPU the same as) and on the host."""
        device, host = defaultdict(float), defaultdict(float)
        for (name, start, event), (_, end, next_event) in zip(self.cuts, self.cuts[1:], strict=False):
            host[name] += (end - start) * 1e3 / num_steps
            device[name] += (event.elapsed_time(next_event) if event else (end - start) * 1e3) / num_steps
        return dict(device), dict(host)


class Usage:
    """CPU time of the main process and of its children, and the load of the GPU, between `start` and `stop`."""

    def __init__(self, device):
        self.device, self.load = device, None

    def start(self):
        self.load = GpuLoad(self.device.index or 0) if self.device.type == "cuda" else None
        self.workers = children()
        self.began, self.main, self.of_workers = time.perf_counter(), time.process_time(), cpu_seconds(self.workers)

    def stop(self):
        """Seconds, cores that the main process and all its workers used, and the share of time that the GPU worked."""
        seconds = time.perf_counter() - self.began
        alive = [worker for worker in self.workers if worker.is_running()]
        return {
            "seconds": seconds,
            "main_cores": (time.process_time() - self.main) / seconds,
            "worker_cores": max(cpu_seconds(alive) - self.of_workers, 0) / seconds,
            "num_workers": len(alive),
            "gpu": self.load.stop() if self.load else None,
        }


class GpuLoad:
    """Mean utilisation of a visible GPU in percent, sampled beside the run by NVML; None without it."""

    def __init__(self, number=0, interval=0.2):
        self.samples, self.interval, self.stopped = [], interval, threading.Event()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        index = visible[number] if number < len(visible) and visible[number] else str(number)
        self.thread = None
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(index) if index.isdigit() else 0)
            self.thread = threading.Thread(target=self._sample, args=(handle,), daemon=True)
            self.thread.start()

    def _sample(self, handle):
        while not self.stopped.wait(self.interval):
            self.samples.append(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)

    def stop(self):
        self.stopped.set()
        if self.thread:
            self.thread.join()
        return sum(self.samples) / len(self.samples) if self.samples else None


class Resident(NamedTuple):
    """Finished images uint8 [b x h x w x 3: RGB] on the device, in the role of a batch that is finished there."""

    images: torch.Tensor

    def __len__(self):
        return len(self.images)

    def on_device(self, room):
        return room(2, self.images.shape).copy_(self.images).permute(0, 3, 1, 2)


class Source:
    """A loader that can be told to hand out one `resident` batch, on the device, instead of reading."""

    def __init__(self, loader, device, timeline):
        self.loader, self.device, self.timeline, self.resident = loader, device, timeline, False
        self.last = None

    def __len__(self):
        return len(self.loader)

    def __getattr__(self, name):
        return getattr(self.loader, name)

    @property
    def copy_stream(self):
        return self.loader.copy_stream  # AttributeError where the loader has none

    @copy_stream.setter
    def copy_stream(self, stream):
        self.loader.copy_stream = stream

    def __iter__(self):
        if self.resident:
            for _ in range(len(self)):
                yield self.last
            return
        for images, targets, paths, shapes in self.loader:
            if self.resident or self.last is None:
                self.last = self._kept(images), targets.clone(), paths, shapes
            self.timeline.mark("copy")
            while self.resident:
                yield self.last
                self.timeline.mark("copy")
            yield images, targets, paths, shapes

    def _kept(self, images):
        """A copy of `images` on the device; deferred steps are made in each step, composed images are there already."""
        if isinstance(images, DeferredBatch):
            return DeferredBatch(*(part.to(self.device, copy=True) for part in images))
        if hasattr(images, "on_device"):  # composed
            finished = images.on_device(lambda _, shape: torch.empty(shape, dtype=torch.uint8, device=self.device))
            return Resident(finished.permute(0, 2, 3, 1).contiguous())
        return images.to(self.device, copy=True)


class Watched:
    """The report of a run, which counts its steps: warm-up, end to end, phases, then a resident batch; then Done.

    A stage ends after its number of steps or its seconds, whichever comes first. With `several` processes it ends after
    the same step in all of them: after the warm-up they agree on the steps that they have seconds for.
    """

    def __init__(self, report, plan, device, timeline, sources, several=False):
        self.report, self.plan, self.device, self.timeline, self.sources = report, list(plan), device, timeline, sources
        self.report.draws_images = False  # the first batches of a run are drawn, which is not of interest
        self.results, self.stage, self.usage = {}, None, Usage(device)
        self.several = several

    def __getattr__(self, name):
        return getattr(self.report, name)

    def epoch(self, epoch, batches, num_batches):
        batches = iter(self.report.epoch(epoch, batches, num_batches))
        while True:
            self.timeline.mark("data")
            batch = next(batches, None)
            self.timeline.mark("other")
            if batch is None:
                return
            self._count(len(batch.images))
            yield batch

    def batch(self, *args):
        self.timeline.mark("read-back")
        self.report.batch(*args)
        self.timeline.mark("other")

    def _count(self, num_images):
        """A new step begins: perhaps a stage is over."""
        if self.stage is None:
            self._begin()
        name, steps, seconds = self.stage
        late = time.perf_counter() - self.usage.began > seconds and self.num_steps >= FEWEST.get(name, 3)
        late = late and not self.several
        if self.num_steps >= steps or late:
            self._end(name)
            if self.several and name == "warm-up":
                self._agree()
            if not self.plan:
                raise Done
            self._begin()
        self.num_steps += 1
        self.num_images += num_images

    def _begin(self):
        self.stage = self.plan.pop(0)
        for source in self.sources:
            source.resident = self.stage[0] == "resident"
        self._wait()
        self.num_steps = self.num_images = 0
        self.usage.start()
        self.timeline.is_on = self.stage[0] == "phases"

    def _end(self, name):
        self._wait()
        usage = self.usage.stop()
        self.results[name] = usage | {
            "steps": self.num_steps, "images": self.num_images, "rate": self.num_images / usage["seconds"],
        }  # fmt: skip
        if name == "phases":
            self.timeline.is_on = False
            device, host = self.timeline.milliseconds(self.num_steps)
            self.results[name] |= {"device_ms": device, "host_ms": host}

    def _agree(self):
        """Replace seconds by steps, those of the slowest process."""
        longest = torch.tensor(self.results["warm-up"]["seconds"] / self.num_steps, device=self.device)
        torch.distributed.all_reduce(longest, torch.distributed.ReduceOp.MAX)
        self.plan = [(name, min(steps, max(3, int(seconds / longest))), seconds) for name, steps, seconds in self.plan]

    def _wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
