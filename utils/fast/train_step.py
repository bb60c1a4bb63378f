"""The training step without waiting for the device (--fast-step).

The work of `Training.step` in the same order, but nothing in it needs an answer from the device: weights and images are
in channels-last order, SGD and the moving average handle all tensors at once with their numbers on the device
(`device_update`), and losses are read back in blocks (`readback`).
"""

import logging
import sys

import torch

from utils.fast.flat_optimizer import FlatAverage, FlatSGD, trained
from utils.fast.loss_readback import ReadBack
from utils.fast.prefetcher import as_float, to_device
from utils.system.distributed import unwrap

logger = logging.getLogger(__name__)

# Seconds that a thread may keep the interpreter while another waits for it. With Python's 5 ms the thread that writes a
# checkpoint or draws a picture holds up the one that feeds the device, for tens of milliseconds in a step.
SWITCH_INTERVAL = 1e-4


class FastSteps:
    """Makes the steps of a Training, by `begin_epoch`, `step`, `late_items`, `end_epoch`, `scalars`, `finish`.

    `interval` is the number of steps between two read-backs of the losses. `twin`, if given, makes of the model what is
    called in its place: other kernels over the same tensors. The Training stays the owner of all state. Another
    optimiser than SGD makes its own steps, and those wait for the device when the loss is scaled.
    """

    INTERVAL = 10

    def __init__(self, training, interval=INTERVAL, twin=None):
        self.training, self.twin = training, twin
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL))
        for model in (training.model, training.ema.ema):
            unwrap(model).to(memory_format=torch.channels_last)
        self.device = next(training.model.parameters()).device
        self.losses = ReadBack(interval, self.device)
        self.is_sgd = isinstance(training.optimizer, torch.optim.SGD)
        if not self.is_sgd:
            logger.warning("--fast-step knows SGD only; %s makes its own steps", type(training.optimizer).__name__)
        self.network = self.average = self.sgd = None  # made when the run begins, and with the first gradients
        # rate of each parameter group, momentum, share of the new weights in the average
        self.numbers = torch.zeros(len(training.optimizer.param_groups) + 2, device=self.device)

    def begin_epoch(self):
        self.training.begin_epoch()
        if self.network is None:
            model = self.training.model
            self.network = (self.twin(model) if self.twin else model).train()
        if self.average and not self.average.is_valid():  # somebody has given the model other tensors
            self.average = self.sgd = None
        if self.sgd:
            self.sgd.drop()

    def step(self, iteration, epoch, batch):
        """Queue the work of one batch; returns the loss items [k x 4] of steps that have become known."""
        self.training.warm_up(iteration, epoch)
        is_update = iteration % self.training.accumulate == 0
        if is_update:
            self._send_numbers()
        self.losses.add(self.items(batch, is_update), iteration, batch.paths)
        return self.losses.known()

    def late_items(self):
        """The loss items [k x 4] that `step` has not returned; waits for them."""
        return self.losses.rest()

    def end_epoch(self):
        return self.training.end_epoch()

    def scalars(self):
        """How often losses were read back so far and what was waited for them, {tag: value} for the event file."""
        return self.losses.statistics.scalars()

    def finish(self):
        logger.info("%s", self.losses.statistics)

    def items(self, batch, is_update):
        """Train on one batch; returns the loss items [4] on the device."""
        images = as_float(batch.images)
        return self.work(
            images, lambda predicted: self.training.compute_loss(predicted, batch.targets, images), is_update
        )

    def work(self, images, compute_loss, is_update):
        """What the device does in a step: forward and backward pass, then SGD and moving average if `is_update`.

        images [B x 3 x H x W] float; `compute_loss` makes loss and items of the predictions.
        """
        training = self.training
        with training.autocast():
            loss, items = compute_loss(self.network(images))
        training.scaler.scale(loss * training.loss_factor).backward()
        if self.average is None:
            self._lay_out()
        if self.is_sgd:
            self.sgd.collect()
        if is_update:
            self._update()
        return items

    def _lay_out(self):
        """Put weights, averages and momentum into flat tensors; which of them are trained, the gradients tell."""
        training, groups = self.training, trained(self.training.optimizer)
        first = [parameter for group in groups for parameter in group]
        self.average = FlatAverage(unwrap(training.model), training.ema.ema, first)
        if self.is_sgd:
            self.sgd = FlatSGD(training.optimizer, training.scaler, groups, self.average.weights)

    def _update(self):
        training = self.training
        if self.is_sgd:
            self.sgd.step(self.numbers[:-1])
        else:
            training.scaler.step(training.optimizer)
            training.scaler.update()
            training.optimizer.zero_grad()
        self.average.move(self.numbers[-1])

    def _send_numbers(self):
        """Send the numbers of the coming update to the device; the work queued before still sees the old ones."""
        ema, groups = self.training.ema, self.training.optimizer.param_groups
        ema.updates += 1
        share = 1 - ema.decay(ema.updates)
        numbers = [*(group["lr"] for group in groups), groups[0].get("momentum", 0.0), share]
        self.numbers.copy_(to_device(torch.tensor(numbers), self.device))
