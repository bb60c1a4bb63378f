"""The training step without waiting for the device (--fast-step).

The work of `Training.step` in the same order, but nothing in it needs an answer from the device: weights and images are
in channels-last order, SGD and the moving average handle all tensors at once with their numbers on the device
(`device_sgd`, `ema.AverageAtOnce`), and losses are read back in blocks (`readback`).
"""

import logging

import torch

from utils.device_sgd import DeviceSGD
from utils.dist import unwrap
from utils.ema import AverageAtOnce
from utils.prefetch import as_float, to_device
from utils.readback import ReadBack

logger = logging.getLogger(__name__)


class FastSteps:
    """Makes the steps of a Training, by `begin_epoch`, `step`, `late_items`, `end_epoch`, `scalars`, `finish`.

    `interval` is the number of steps between two read-backs of the losses. The Training stays the owner of all state.
    Another optimiser than SGD makes its own steps, and those wait for the device when the loss is scaled. `make_twin`
    gives the form of a model that is trained in its place, on the same tensors (see models/twin.py).
    """

    def __init__(self, training, interval=10, make_twin=None):
        self.training, self.average = training, AverageAtOnce()
        self.make_twin, self.net = make_twin or (lambda model: model), None
        training.ema.average = self.average
        for model in (training.model, training.ema.ema):
            unwrap(model).to(memory_format=torch.channels_last)
        self.device = next(training.model.parameters()).device
        self.losses = ReadBack(interval, self.device)
        self.sgd = None
        if isinstance(training.optimizer, torch.optim.SGD):
            self.sgd = DeviceSGD(training.optimizer, training.scaler)
        else:
            logger.warning("--fast-step knows SGD only; %s makes its own steps", type(training.optimizer).__name__)
        # rate of each parameter group, momentum, weight of the old average, weight of the new weights
        self.numbers = torch.zeros(len(training.optimizer.param_groups) + 3, device=self.device)

    def begin_epoch(self):
        self.training.begin_epoch()
        self.net = self.net or self.make_twin(self.training.model)
        self.net.train()
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
            loss, items = compute_loss(self.net(images))
        training.scaler.scale(loss * training.loss_factor).backward()
        if self.sgd:
            self.sgd.collect()
        if is_update:
            self._update()
        return items

    def _update(self):
        training = self.training
        if self.sgd:
            self.sgd.step(self.numbers[:-2])
        else:
            training.scaler.step(training.optimizer)
            training.scaler.update()
            training.optimizer.zero_grad()
        with torch.no_grad():
            self.average.move(training.ema.ema, unwrap(training.model), self.numbers[-2], self.numbers[-1])

    def _send_numbers(self):
        """Send the numbers of the coming update to the device; the work queued before still sees the old ones."""
        ema, groups = self.training.ema, self.training.optimizer.param_groups
        ema.updates += 1
        decay = ema.decay(ema.updates)
        numbers = [*(group["lr"] for group in groups), groups[0].get("momentum", 0.0), decay, 1 - decay]
        self.numbers.copy_(to_device(torch.tensor(numbers), self.device))
