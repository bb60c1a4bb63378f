"""The training step without waiting for the device (--fast-step).

The work of `Trainer.step` in the same order, but nothing in it needs an answer from the device: weights and images are
in channels-last order, SGD and the moving average handle all tensors at once with their numbers on the device
(flat_optimizer.py), and losses are read back in blocks (loss_readback.py).
"""

import logging
from collections.abc import Callable

import torch

from utils.engine.batches import Batch
from utils.engine.trainer import Trainer
from utils.fast.exchange import Alone
from utils.fast.flat_optimizer import FlatAverage, FlatSGD, KeptHalfCopy, trained
from utils.fast.loss_readback import ReadBack
from utils.fast.prefetcher import as_float, to_device
from utils.system.distributed import unwrap

logger = logging.getLogger(__name__)


class FastSteps:
    """Makes the steps of a Trainer, by the same methods; the Trainer stays the owner of all state.

    `interval` is the number of steps between two read-backs of the losses. Another optimiser than SGD makes its own
    steps, and those wait for the device when the loss is scaled. `open_exchange(device)` joins the other processes of a
    run whose model is not wrapped.
    """

    def __init__(self, trainer: Trainer, interval: int = 10, open_exchange: Callable[..., Alone] = Alone):
        self.trainer = trainer
        for model in (trainer.model, trainer.ema.ema):
            unwrap(model).to(memory_format=torch.channels_last)
        trainer.ema.half_copy = KeptHalfCopy()
        self.device = next(trainer.model.parameters()).device
        self.losses = ReadBack(interval, self.device)
        self.exchange = open_exchange(self.device)
        self.is_sgd = isinstance(trainer.optimizer, torch.optim.SGD)
        if not self.is_sgd:
            logger.warning("--fast-step knows SGD only; %s makes its own steps", type(trainer.optimizer).__name__)
        # made with the first gradients, which tell what is trained
        self.average: FlatAverage | None = None
        self.sgd: FlatSGD | None = None  # stays None for another optimiser
        self.modules: list = []  # that have to be in training mode
        # rate of each parameter group, momentum, share of the new weights in the average
        self.numbers = torch.zeros(len(trainer.optimizer.param_groups) + 2, device=self.device)

    def begin_epoch(self) -> None:
        # To set the mode of all modules, and to clear gradients that are kept elsewhere, takes milliseconds as well.
        if not self.sgd or not all(module.training for module in self.modules):
            self.trainer.begin_epoch()
            self.modules = [*self.trainer.model.modules(), *self.trainer.network.modules()]
        self.exchange.begin_epoch(self.trainer)
        if self.average and not self.average.is_valid():  # somebody has given the model other tensors
            self.average = self.sgd = None
        if self.sgd:  # its gradients lie beside the parameters', where the optimiser does not find them
            self.sgd.drop()

    def step(self, iteration: int, epoch: int, batch: Batch) -> torch.Tensor:
        """Queue the work of one batch; returns the loss items [k x 4] of steps that have become known."""
        trainer = self.trainer
        trainer.warm_up(iteration, epoch)  # on the host; first, because it sets `accumulate` and the rates
        is_update = iteration % trainer.accumulate == 0
        if is_update:
            # Queued before the work that reads the numbers. Work of earlier steps is ahead of it in the stream, and
            # still sees the old ones.
            self._send_numbers()
        self.work(batch, iteration, is_update)
        # Last, after everything is queued: while the host looks for what has arrived, the device has work.
        return self.losses.known()

    def with_room(self, call: Callable) -> Callable:
        return call

    def late_items(self) -> torch.Tensor:
        """The loss items [k x 4] that `step` has not returned; waits for them."""
        return self.losses.rest()

    def end_epoch(self) -> list[float]:
        if self.average:
            state = self.average.state()
            if self.sgd:
                state["momentum"] = self.sgd.momentum
            if self.trainer.scaler.is_enabled():
                state["loss scale"] = self.trainer.scaler._scale
            self.exchange.end_epoch(self.average.buffers(), state)
        return self.trainer.end_epoch()

    def scalars(self) -> dict[str, float]:
        """How often losses were read back so far and what was waited for them, {tag: value} for the event file."""
        return self.losses.statistics.scalars()

    def finish(self) -> None:
        self.exchange.finish()
        logger.info("%s", self.losses.statistics)

    def work(self, batch: Batch, iteration: int, is_update: bool) -> None:
        """Queue all that the device does in a step."""
        items = self.backward(batch)
        # At once: captured work writes its items to the same place every time, and an update may use that memory.
        self.losses.add(items, iteration, batch.paths)
        if is_update:
            if self.sgd:  # for other optimisers the model is wrapped
                self.exchange.add_gradients(self.sgd.gradient, iteration)
            self.update()

    def backward(self, batch: Batch) -> torch.Tensor:
        """Add the gradients of one batch; returns its loss items [4] on the device."""
        images = batch.images
        return self.forward_backward(
            images, lambda predicted: self.trainer.compute_loss(predicted, batch.targets, images)
        )

    def as_input(self, images: torch.Tensor) -> torch.Tensor:
        """Images [B x 3 x H x W] as the network reads them: the fused one (models/fused) takes bytes as they are."""
        return images if getattr(self.trainer.network, "takes_bytes", False) else as_float(images)

    def forward_backward(self, images: torch.Tensor, compute_loss: Callable) -> torch.Tensor:
        """Forward and backward pass; images [B x 3 x H x W], `compute_loss` makes loss and items of predictions.

        No line may read a value back, or depend on one: a graph captures all of it, and all of `update`.
        """
        trainer = self.trainer
        with trainer.autocast():
            loss, items = compute_loss(trainer.network(self.as_input(images)))
        # The factor is meant for DDP's mean over the processes; the exchange takes the sum.
        trainer.scaler.scale(loss * (trainer.loss_factor / self.exchange.world_size)).backward()
        if self.average is None:  # between the first gradients and their first use
            self._lay_out()
        if self.sgd:
            # After every backward pass, not only before an update: the parameters have no gradient in the next one, so
            # autograd stores its tensors as they are instead of adding to each.
            self.sgd.collect()
        return items

    def _lay_out(self):
        """Put weights, averages and momentum into flat tensors; which of them are trained, the gradients tell."""
        trainer, groups = self.trainer, trained(self.trainer.optimizer)
        first = [parameter for group in groups for parameter in group]
        self.average = FlatAverage(unwrap(trainer.model), trainer.ema.ema, first)
        if self.is_sgd:
            self.sgd = FlatSGD(trainer.optimizer, trainer.scaler, groups, self.average.weights)

    def update(self) -> None:
        """SGD with the gradients collected, then the moving average."""
        trainer, average = self.trainer, self.average
        assert average is not None
        if self.sgd:
            self.sgd.step(self.numbers[:-1])
        else:
            trainer.scaler.step(trainer.optimizer)
            trainer.scaler.update()
            trainer.optimizer.zero_grad()
        average.move(self.numbers[-1])  # after the step: it averages the new weights

    def _send_numbers(self):
        """Send the numbers of the coming update to the device."""
        ema, groups = self.trainer.ema, self.trainer.optimizer.param_groups
        ema.updates += 1
        share = 1 - ema.decay(ema.updates)
        numbers = [*(group["lr"] for group in groups), groups[0].get("momentum", 0.0), share]
        self.numbers.copy_(to_device(torch.tensor(numbers), self.device))
