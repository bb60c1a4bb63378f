"""The optimiser, its parameter groups, and the schedules of learning rate, momentum and accumulation."""

import logging
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

logger = logging.getLogger(__name__)

NOMINAL_BATCH = 64  # images that one optimiser step is meant to see
LONGER_WARMUP_BATCH, LONGER_WARMUP_EPOCHS = 128, 5  # of --auto-lr
IMPLICIT_ATTRIBUTES = ("im", "imc", "imb", "imo", "ia")  # implicit knowledge of a detection layer, in this order
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


# Parameter groups ---------------------------------------------------------------------------------------------------


class ParameterGroups(NamedTuple):
    """Parameters by name, in the order that makes optimiser states of checkpoints interchangeable with stock's."""

    no_decay: dict  # weights of normalisation layers, implicit knowledge, and whatever is neither weight nor bias
    decay: dict  # all other weights
    biases: dict


def parameter_groups(model):
    """Sort all parameters of `model` into `ParameterGroups`, module by module."""
    groups = ParameterGroups({}, {}, {})
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own = dict(module.named_parameters(recurse=False))
        if "bias" in own:
            groups.biases[f"{prefix}bias"] = own["bias"]
        if "weight" in own:
            kind = groups.no_decay if isinstance(module, NORMS) else groups.decay
            kind[f"{prefix}weight"] = own["weight"]
        for attribute in IMPLICIT_ATTRIBUTES:
            implicit = getattr(module, attribute, None)
            if isinstance(implicit, nn.Module):
                groups.no_decay.update(implicit.named_parameters(prefix=prefix + attribute))
    # a parameter of any other name would never be trained
    sorted_ids = {id(parameter) for group in groups for parameter in group.values()}
    groups.no_decay.update((name, p) for name, p in model.named_parameters() if id(p) not in sorted_ids)
    return groups


def build_optimizer(model, lr0, momentum, weight_decay, adam=False):
    """SGD with Nesterov momentum, or Adam, over the groups 0 (no decay), 1 (decay) and 2 (biases, no decay)."""
    groups = parameter_groups(model)
    options = [
        {"params": list(group.values()), "weight_decay": weight_decay if group is groups.decay else 0.0}
        for group in groups
    ]
    if adam:
        optimizer = torch.optim.Adam(options, lr=lr0, betas=(momentum, 0.999))
    else:
        optimizer = torch.optim.SGD(options, lr=lr0, momentum=momentum, nesterov=True)
    counts = len(groups.biases), len(groups.decay), len(groups.no_decay)
    logger.info("Optimizer groups: %d .bias, %d conv.weight, %d other", *counts)
    return optimizer


# Batch size ---------------------------------------------------------------------------------------------------------


def accumulation_steps(total_batch):
    """Batches of `total_batch` images (over all processes) that make up one nominal batch, at least one."""
    return max(round(NOMINAL_BATCH / total_batch), 1)


def for_large_batch(hyp, total_batch):
    """`hyp` for --auto-lr: above a nominal batch the rate grows with the square root, from 128 the warm-up is longer.

    `total_batch` is the number of images over all processes.
    """
    if total_batch <= NOMINAL_BATCH:
        logger.info("--auto-lr: batch %d is not above %d, lr0 %g and warmup_epochs %g stay",
                    total_batch, NOMINAL_BATCH, hyp["lr0"], hyp["warmup_epochs"])  # fmt: skip
        return hyp
    changed = hyp | {"lr0": hyp["lr0"] * math.sqrt(total_batch / NOMINAL_BATCH)}
    if total_batch >= LONGER_WARMUP_BATCH:
        changed["warmup_epochs"] = max(hyp["warmup_epochs"], LONGER_WARMUP_EPOCHS)
    logger.info(
        "--auto-lr: batch %d, lr0 %g -> %.5g, warmup_epochs %g -> %g",
        total_batch, hyp["lr0"], changed["lr0"], hyp["warmup_epochs"], changed["warmup_epochs"],
    )  # fmt: skip
    return changed


def scaled_weight_decay(weight_decay, total_batch):
    """`weight_decay` for the number of images that one optimiser step really sees."""
    return weight_decay * (total_batch * accumulation_steps(total_batch) / NOMINAL_BATCH)


# Schedules ----------------------------------------------------------------------------------------------------------


def lr_factor(epochs, lrf, linear=False):
    """The function from epoch to the factor on the initial rate: from 1 to `lrf`, on a half cosine or a straight line.

    The line ends at the last epoch, the cosine one epoch later. Meant for LambdaLR with `last_epoch` set to the first
    epoch - 1. stock behaviour: so the step after epoch e sets the rate of epoch e, and epoch e + 1 trains with it.
    """

    def on_line(epoch):
        # a single epoch has no second point: it trains with the full rate
        return (1 - epoch / max(epochs - 1, 1)) * (1 - lrf) + lrf

    def on_cosine(epoch):
        return ((1 - math.cos(math.pi * epoch / epochs)) / 2) * (lrf - 1) + 1

    return on_line if linear else on_cosine


def warmup_length(hyp: dict, num_batches: int, epochs: int) -> int:
    """The warm-up in iterations. stock behaviour: never below 1000, however short the run, unless the file says so.

    A run of `epochs` with `num_batches` each that ends inside its warm-up is warned, and told what shortens it.
    """
    by_epochs, iterations = hyp["warmup_epochs"] * num_batches, epochs * num_batches
    length = max(round(by_epochs), hyp.get("warmup_min_iters", 1000))
    if iterations <= length and "warmup_min_iters" not in hyp:  # who sets it, knows
        enough = max(iterations // 5, 1)
        advice = f"warmup_min_iters: {min(enough, max(round(by_epochs), 1))}"
        if by_epochs > enough:
            advice = f"warmup_min_iters: {enough} and warmup_epochs: {enough / num_batches:.2g}"
        logger.warning("the warm-up lasts %d iterations but the run has only %d, so the learning rate never reaches "
                       "its planned values; put %s into the hyper-parameter file to shorten it",
                       length, iterations, advice)  # fmt: skip
    return length


class Warmup(NamedTuple):
    """What one iteration of the warm-up trains with."""

    accumulate: int  # batches per optimiser step
    lrs: tuple  # learning rate of groups 0, 1 and 2
    momentum: float


def warmup(ni, nw, total_batch, target_lr, bias_lr, start_momentum, momentum):
    """`Warmup` values of iteration `ni` on the way from 0 to `nw`.

    Rates rise from 0 to `target_lr`, that of the biases falls (usually) from `bias_lr` to it; momentum goes from
    `start_momentum` to `momentum`, and the number of accumulated batches from one to the nominal batch.
    """

    def ramp(start, end):
        return float(np.interp(ni, [0, nw], [start, end]))

    accumulate = max(1, round(ramp(1, NOMINAL_BATCH / total_batch)))
    others = ramp(0.0, target_lr)
    return Warmup(accumulate, (others, others, ramp(bias_lr, target_lr)), ramp(start_momentum, momentum))


def apply_warmup(optimizer, values):
    """Set the rates, and the momentum where the optimiser has one."""
    for group, lr in zip(optimizer.param_groups, values.lrs, strict=True):
        group["lr"] = lr
        if "momentum" in group:
            group["momentum"] = values.momentum
