"""The training step with all its state, and how far a run has come."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from utils.engine import optimizer as optim
from utils.engine.batches import Batch
from utils.engine.checkpoint import NEW_COPIES, training_checkpoint
from utils.engine.checkpoint_reader import same_layout, transfer

logger = logging.getLogger(__name__)
NUMBERS = (int, float, type(None))  # what an optimiser keeps beside tensors; booleans are whole numbers


@dataclass
class Progress:
    """How far a run has come: epochs `start_epoch` to `epochs` - 1 are trained.

    `results` (7: P, R, mAP@.5, mAP@.5:.95, box, obj, cls loss) and `maps` [nc: AP of each class] are those of the last
    validation; `results_text` the results.txt of the epochs before. `best_epoch` and `tested_epoch` are the best and
    the last validated one (-1: none yet), `trained` counts the epochs since this start. `random_states` are the
    generators of all processes after the last epoch: None in a fresh run, [] if a resumed run does not know them.
    """

    epochs: int
    maps: np.ndarray
    start_epoch: int = 0
    best_fitness: float = 0.0
    results: tuple = (0.0,) * 7
    results_text: str = ""
    best_epoch: int = -1
    tested_epoch: int = -1
    trained: int = 0
    random_states: list | None = None
    images: dict | None = None  # of the training set: see utils.engine.resume.note_images


class Trainer:
    """Makes the steps of a run, and owns what they change: weights, their average, optimiser, schedule, loss scale.

    `hyp` gives the start of the warm-up (warmup_bias_lr, warmup_momentum) and the momentum after it; `total_batch` is
    the number of images of one batch over all processes. The forward pass runs in `precision` where that is safe (see
    `precision_of`); with fp16, the default on a GPU, the loss is scaled.
    """

    def __init__(self, model, hyp, total_batch, optimizer, scheduler, ema, precision=None):
        self.model, self.optimizer, self.scheduler, self.ema = model, optimizer, scheduler, ema
        self.hyp, self.total_batch = hyp, total_batch
        self.device_type = next(model.parameters()).device.type
        self.low_precision = precision_of(precision, self.device_type)
        self.scaler = torch.amp.GradScaler(self.device_type, enabled=self.low_precision is torch.float16)
        self.accumulate = optim.accumulation_steps(total_batch)  # batches for one optimiser step

    def restore(self, stored, epochs, nc, resume=False):
        """Take over the training state of a Checkpoint, if it has one that fits; returns the Progress of the run.

        stock behaviour: a checkpoint that is not stripped continues its epochs also when given as --weights; when it
        has had more than were asked for, its epoch number is added to them.
        With `resume` there may be none left: then the run only has to be finished.
        Raises ValueError when no epoch is left, when the state belongs to another optimiser, or, with `resume`, to
        another model.
        """
        progress = Progress(epochs, maps=np.zeros(nc))
        if stored is None or stored.optimizer is None or stored.epoch is None:
            return progress
        if not same_layout(self.model, stored.for_training().state):
            if resume:
                raise ValueError(
                    f"{stored.path} holds another model than these options and this data set describe (for instance "
                    "another number of classes); start a new run with --weights"
                )
            return progress
        self._restore_optimizer(stored)
        if stored.ema is not None:
            transfer(self.ema.ema, stored.ema.state)
            self.ema.updates = stored.updates or 0
        progress.start_epoch, progress.best_fitness = stored.epoch + 1, stored.best_fitness or 0.0
        progress.results_text = stored.training_results or ""
        if progress.epochs < progress.start_epoch:
            progress.epochs += stored.epoch
        if progress.epochs <= progress.start_epoch and not resume:
            raise ValueError(
                f"{stored.path} has had {progress.start_epoch} epochs, so --epochs {epochs} leaves nothing to train: "
                "give more epochs, or start anew from the best.pt of a finished run, which holds no training state"
            )
        if not resume:  # that says so itself
            logger.info("Continuing the training of %s after epoch %d", stored.path, stored.epoch)
        return progress

    def _restore_optimizer(self, stored):
        try:
            if _layout(stored.optimizer["param_groups"]) != _layout(self.optimizer.param_groups):
                raise ValueError("its parameter groups differ")
            self.optimizer.load_state_dict(stored.optimizer)
            if not all(_fits(parameter, state) for parameter, state in self.optimizer.state.items()):
                raise ValueError("a tensor of its state has another shape than its parameter")
            if not all(isinstance(v, NUMBERS) for group in self.optimizer.param_groups for v in _settings(group)):
                raise ValueError("a setting of its parameter groups is no number")
            if stored.scaler:
                if not all(isinstance(value, (int, float)) for value in stored.scaler.values()):
                    raise ValueError("a setting of its loss scaler is no number")
                self.scaler.load_state_dict(stored.scaler)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(
                f"{stored.path} holds the state of another optimizer ({error}): give or drop --adam as in that run, "
                "or start anew from the best.pt of a finished run, which holds no training state"
            ) from error

    def resume_schedule(self, epoch):
        """Rates as the present schedule has them after `epoch`, and the present weight decay, not the restored ones."""
        fresh = zip(self.optimizer.param_groups, self.scheduler.base_lrs, self.scheduler.lr_lambdas, strict=True)
        for group, initial_lr, factor in fresh:
            group["initial_lr"], group["lr"] = initial_lr, initial_lr * factor(epoch)
            if group["weight_decay"]:
                group["weight_decay"] = optim.scaled_weight_decay(self.hyp["weight_decay"], self.total_batch)

    def start(
        self, model: nn.Module, compute_loss: Callable, loss_factor: float, first_epoch: int, num_warmup: int,
        network: nn.Module | None = None,
    ) -> None:  # fmt: skip
        """Set what is known only after the data: how the model is called, its loss, and where the schedules begin.

        `model` may be a data-parallel wrapper. The forward pass calls `network`, by default the model itself: it may be
        another form of the same parameters. `compute_loss(predictions, targets, images)` returns (loss, items);
        `loss_factor` multiplies the loss before the backward pass; `num_warmup` is the warm-up in iterations.
        """
        self.model, self.network = model, model if network is None else network
        self.compute_loss, self.loss_factor = compute_loss, loss_factor
        self.scheduler.last_epoch, self.num_warmup = first_epoch - 1, num_warmup

    def begin_epoch(self) -> None:
        """Training mode; stock behaviour: gradients left over from an unfinished accumulation are dropped."""
        self.model.train()
        self.network.train()
        self.optimizer.zero_grad()

    def step(self, iteration: int, epoch: int, batch: Batch) -> torch.Tensor:
        """Train on one batch, with an optimiser step each `accumulate` iterations; returns the loss items [4].

        `iteration` counts over all epochs.
        """
        # Before the work: `update` below uses the rates of this iteration, and `accumulate` decides whether it comes.
        self.warm_up(iteration, epoch)
        items = self.forward_backward(batch)
        # Counted over all epochs, so that an accumulation does not start anew with each; iteration 0 updates at once.
        if iteration % self.accumulate == 0:
            self.update()
        return items

    def late_items(self) -> torch.Tensor:
        """Loss items of this epoch that `step` has not returned: none [0 x 4]."""
        return torch.zeros(0, 4)

    def with_room(self, call: Callable) -> Callable:
        """`call`, work between the steps, in a form that can use the memory that steps hold: they hold none here."""
        return call

    def scalars(self) -> dict[str, float]:
        """Numbers {tag: value} about the steps so far, for the event file: none."""
        return {}

    def finish(self) -> None:
        """The run is over; there is nothing to tell."""

    def warm_up(self, iteration, epoch):
        """Within the warm-up, set the learning rates, momentum and accumulation of this iteration (over all epochs)."""
        if iteration > self.num_warmup:
            return
        target_lr = self.optimizer.param_groups[0]["initial_lr"] * self.scheduler.lr_lambdas[0](epoch)
        values = optim.warmup(
            iteration, self.num_warmup, self.total_batch, target_lr,
            self.hyp["warmup_bias_lr"], self.hyp["warmup_momentum"], self.hyp["momentum"],
        )  # fmt: skip
        optim.apply_warmup(self.optimizer, values)
        self.accumulate = values.accumulate

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Add the gradients of one batch; returns the loss items [4: box, objectness, class, total]."""
        # The loss belongs inside: it takes the predictions in half precision. The backward pass stays outside, because
        # its operations follow the types of the forward pass by themselves.
        with self.autocast():
            loss, items = self.compute_loss(self.network(batch.images), batch.targets, batch.images)
        # The factor makes up for the mean that several processes take of their gradients. Scaled last, so that small
        # gradients survive in fp16; the items are reported unscaled.
        self.scaler.scale(loss * self.loss_factor).backward()
        return items

    def autocast(self):
        """The context in which forward pass and loss run."""
        return torch.autocast(self.device_type, self.low_precision, enabled=self.low_precision is not None)

    def update(self) -> None:
        """One optimiser step on the gradients collected so far, then the moving average."""
        self.scaler.step(self.optimizer)  # takes the scale off the gradients; no step if one of them is not finite,
        self.scaler.update()  # and then a smaller scale from now on
        self.optimizer.zero_grad()  # only here: until the next update, batches add to the same gradients
        self.ema.update(self.model)  # stock behaviour: also when the step was left out

    def end_epoch(self) -> list[float]:
        """Advance the schedule; returns the learning rate of each group that the epoch ended with."""
        rates = [group["lr"] for group in self.optimizer.param_groups]  # before the schedule sets the next ones
        self.scheduler.step()
        return rates

    def checkpoint(self, epoch, best_fitness, results_text, copies=NEW_COPIES):
        """The content of a checkpoint after `epoch`."""
        return training_checkpoint(
            epoch, best_fitness, results_text, self.model, self.ema, self.optimizer, self.scaler, copies
        )


def precision_of(name, device_type):
    """The 16-bit type that --amp names (fp16, bf16, off), or None; by default float16 on a GPU and none on a CPU."""
    if name is None:
        name = "fp16" if device_type == "cuda" else "off"
    if name == "fp16" and device_type == "cpu":
        logger.warning("--amp fp16 is for GPUs; this run on a CPU trains in float32 (--amp bf16 works here, too)")
        name = "off"
    return {"fp16": torch.float16, "bf16": torch.bfloat16, "off": None}[name]


def _fits(parameter, state):
    """Whether the optimiser state of a parameter is tensors of its shape, and numbers."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    others = [value for value in state.values() if not isinstance(value, (torch.Tensor, *NUMBERS))]
    return not others and all(tensor.shape == parameter.shape or tensor.dim() == 0 for tensor in tensors)


def _settings(group):
    """The numbers of a parameter group, the pair `betas` of Adam as two."""
    settings = [value for key, value in group.items() if key not in ("params", "betas")]
    return [group["lr"], group["weight_decay"], *settings, *group.get("betas", ())]


def _layout(groups):
    """What tells parameter groups apart: the kind of optimiser, and how many parameters each has."""
    return [("momentum" in group, len(group["params"])) for group in groups]


def freeze_layers(model, layers):
    """Stop training the parameters of `layers`: [n] means the first n, a longer list those layers.

    stock behaviour: the running statistics of their BatchNorm still move. Raises ValueError when there is no such
    layer or none is left.
    """
    num_layers = len(model.model)
    if not 0 <= min(layers) <= max(layers) <= num_layers - (len(layers) > 1):
        raise ValueError(f"--freeze {' '.join(map(str, layers))}: the model has the layers 0 to {num_layers - 1}")
    frozen = [f"model.{i}." for i in (layers if len(layers) > 1 else range(layers[0]))]
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not any(prefix in name for prefix in frozen)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"--freeze {' '.join(map(str, layers))} leaves no layer to train")
