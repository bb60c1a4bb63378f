"""Train a YOLOv7 detector: everything that happens to a run, in order.

python train.py --data data/coco.yaml --cfg cfg/training/yolov7-tiny.yaml --hyp data/hyp.scratch.tiny.yaml --img 320
"""

import logging
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from models.experimental import rebuild
from models.yolo import Model
from test import evaluate, log_scores, score_checkpoint
from utils import cli, dist, fastpaths, optim
from utils.autoanchor import check_anchors
from utils.checkpoint import Checkpoints, NoCheckpoints, check_finite, read_checkpoint, transfer
from utils.data_yaml import load_data_yaml
from utils.datasets import LoadImagesAndLabels, create_dataloader
from utils.ema import ModelEMA
from utils.evolve import evolve
from utils.feed import Trainable, multi_scaled
from utils.hyp import load_hyp, save_hyp, scale_hyp
from utils.labels import check_has_boxes, check_labels
from utils.metrics import fitness
from utils.options import round_up, save_options, train_parser
from utils.report import open_report
from utils.runs import open_run_folder, prepare_train_options
from utils.sampling import draw_image_indices, labels_to_class_weights
from utils.seeding import seed_epoch
from utils.training import Training, freeze_layers

logger = logging.getLogger("train")


class Loaders(NamedTuple):
    """What a run reads. `val` is None in all processes but the main one; `image_size` in pixels."""

    train: DataLoader
    val: DataLoader | None
    dataset: LoadImagesAndLabels
    image_size: int


def main(opt):
    """Prepare options and processes, then train once, or as often as --evolve asks."""
    ranks = dist.read_ranks(opt.local_rank)
    opt = prepare_train_options(opt, ranks)
    hyp, data = load_hyp(opt.hyp), load_data_yaml(opt.data, opt.single_cls)
    device = dist.select_device(opt.device, opt.batch_size, ranks)
    dist.start_processes(ranks, device)
    if opt.evolve:
        open_run_folder(opt, ranks)
        evolve(partial(train, opt=opt, data=data, device=device, ranks=ranks), hyp, opt.save_dir, opt.evolve)
    else:
        train(hyp, opt, data, device, ranks)
    dist.stop_processes()


def train(hyp, opt, data, device, ranks):
    """One training run. Returns the last validation: P, R, mAP@.5, mAP@.5:.95, box, obj and cls loss."""
    dist.init_seeds(2 + ranks.rank)
    paths = fastpaths.choose(opt, device)

    model, stored = build_model(opt, hyp, data, device)
    freeze_layers(model, opt.freeze)
    decay = optim.scaled_weight_decay(hyp["weight_decay"], opt.total_batch_size)
    optimizer = optim.build_optimizer(model, hyp["lr0"], hyp["momentum"], decay, opt.adam)
    scheduler = LambdaLR(optimizer, optim.lr_factor(opt.epochs, hyp["lrf"], opt.linear_lr))
    training = Training(model, hyp, opt.total_batch_size, optimizer, scheduler, ModelEMA(model))
    progress = training.restore(stored, opt.epochs, data.nc, opt.resume)
    if progress.epochs != opt.epochs:  # the schedule ends where the run ends
        scheduler.lr_lambdas = [optim.lr_factor(progress.epochs, hyp["lrf"], opt.linear_lr)] * 3

    loaders = open_loaders(opt, hyp, data, max(int(model.stride.max()), 32), ranks, progress.start_epoch)
    report, checkpoints = open_records(opt, hyp, data, ranks, progress)
    if not opt.resume:
        report.labels(loaders.dataset.labels)
        if ranks.is_main:  # the other processes receive the anchors with the weights
            check_anchors(loaders.dataset, model, hyp["anchor_t"], loaders.image_size, refit=not opt.noautoanchor)
            training.ema.copy_anchors(model)
        model.half().float()  # stock behaviour: a fresh run starts from weights rounded to half precision
    model.nc, model.names, model.gr = data.nc, data.names, 1.0
    model.hyp = scale_hyp(hyp, model.model[-1].nl, data.nc, loaders.image_size, opt.label_smoothing)
    model.class_weights = labels_to_class_weights(loaders.dataset.labels, data.nc).to(device) * data.nc
    checkpoints.initial(model)

    num_batches = len(loaders.train)
    num_warmup = optim.warmup_iterations(hyp["warmup_epochs"], num_batches, hyp.get("warmup_min_iters", 1000))
    if "warmup_min_iters" not in hyp:  # who sets it, knows
        optim.warn_if_warmup_outlasts(num_warmup, hyp["warmup_epochs"], progress.epochs, num_batches)
    loss_of_epoch, validation_loss = paths.losses(model, progress.epochs)
    loss_factor = ranks.world_size * (4 if opt.quad else 1)
    called = dist.data_parallel(model, device, ranks, opt.device, opt.sync_bn)
    training.start(called, loss_of_epoch(progress.start_epoch), loss_factor, progress.start_epoch, num_warmup)
    validate = partial(validate_ema, training.ema, loaders.val, data, validation_loss, opt, device)

    started = time.monotonic()
    trainable = Trainable(int(model.stride.max()))
    for epoch in range(progress.start_epoch, progress.epochs):
        training.compute_loss = loss_of_epoch(epoch)
        choose_images(epoch, opt, loaders, model.class_weights, progress.maps, ranks, device)
        batches = paths.feed(loaders.train, device)
        if opt.multi_scale:
            batches = multi_scaled(batches, loaders.image_size, max(int(model.stride.max()), 32))
        rates = train_one_epoch(epoch, num_batches, trainable(batches), training, report)
        if ranks.is_main:
            finish_epoch(epoch, rates, opt, training, progress, validate, report, checkpoints)
    report.finish()
    hours = (time.monotonic() - started) / 3600
    logger.info("%d epochs completed in %.3f hours", progress.epochs - progress.start_epoch, hours)
    for path in checkpoints.written() if data.is_coco and data.nc == 80 else ():
        score_checkpoint(path, data, opt, loaders.val.dataset.img_size, iou_thres=0.7)
    checkpoints.strip(rebuild)
    return progress.results


def train_one_epoch(epoch, num_batches, batches, training, report):
    """Every batch of an epoch: forward, loss, backward, and an optimiser step each `accumulate` batches.

    Returns the learning rates that it ended with.
    """
    training.begin_epoch()
    for i, batch in enumerate(report.epoch(epoch, batches, num_batches)):
        iteration = i + num_batches * epoch
        training.warm_up(iteration, epoch)
        items = training.forward_backward(batch)
        if iteration % training.accumulate == 0:
            training.update()
        report.batch(items, batch.images, batch.targets, batch.paths)
    return training.end_epoch()


def finish_epoch(epoch, rates, opt, training, progress, validate, report, checkpoints):
    """Validate the moving average when this epoch asks for it, write the results and the checkpoints."""
    training.ema.update_attr(training.model, include=("yaml", "nc", "hyp", "gr", "names", "stride", "class_weights"))
    is_last = epoch + 1 == progress.epochs
    is_tested = is_last or not opt.notest
    if is_tested:
        progress.results, progress.maps = validate(is_last)
    report.epoch_done(progress.results, rates, progress.maps if is_tested else None)
    score_now = float(fitness(np.array(progress.results)))
    is_best = is_tested and score_now >= progress.best_fitness
    progress.best_fitness = max(progress.best_fitness, score_now)
    content = partial(training.checkpoint, epoch, progress.best_fitness, report.results_text())
    checkpoints.after_epoch(content, epoch, is_best)


def validate_ema(ema, loader, data, compute_loss, opt, device, is_last):
    """Score the moving average (in half precision on a GPU); returns its results and the AP of every class."""
    evaluation = evaluate(
        ema.ema_for_evaluation(half=device.type == "cuda"), loader, data.nc, data.names, single_cls=opt.single_cls,
        compute_loss=compute_loss, v5_metric=opt.v5_metric,
        picture_dir=opt.save_dir if is_last and not opt.evolve else None,
    )  # fmt: skip
    log_scores(evaluation.scores, data.names, per_class=is_last and 1 < data.nc < 50)
    return evaluation.results, evaluation.maps


def build_model(opt, hyp, data, device):
    """The model to train, and the Checkpoint it starts from (None from scratch)."""
    if not opt.weights:
        return Model(opt.cfg, ch=3, nc=data.nc, anchors=hyp.get("anchors")).to(device), None
    stored = read_checkpoint(opt.weights)
    source = stored.model or stored.ema
    check_finite(source, opt.weights)
    if not opt.cfg and source.yaml is None:
        raise ValueError(f"{opt.weights} does not say which model it belongs to; give --cfg")
    model = Model(opt.cfg or source.yaml, ch=3, nc=data.nc, anchors=hyp.get("anchors")).to(device)
    keep_anchors = (opt.cfg or hyp.get("anchors")) and not opt.resume
    num_taken = transfer(model, source.state, exclude=("anchor",) if keep_anchors else ())
    logger.info("Transferred %d/%d items from %s", num_taken, len(model.state_dict()), opt.weights)
    return model, stored


def open_records(opt, hyp, data, ranks, progress):
    """Report and checkpoints of this process; the main one also writes hyp.yaml and opt.yaml, as they were given.

    The run folder appears here, when all input has been found good.
    """
    open_run_folder(opt, ranks)
    report, checkpoints = open_report(opt, data.names, ranks), NoCheckpoints()
    if ranks.is_main and not opt.resume:
        save_hyp(hyp, Path(opt.save_dir) / "hyp.yaml")
        save_options(opt, Path(opt.save_dir) / "opt.yaml")
    if ranks.is_main and not opt.evolve:
        checkpoints = Checkpoints(Path(opt.save_dir) / "weights", progress.epochs, not opt.nosave)
    if progress.start_epoch:
        report.resume(progress.results_text, progress.epochs)
    return report, checkpoints


def open_loaders(opt, hyp, data, stride, ranks, first_epoch):
    """The Loaders of a run, with labels checked: ids within the classes, and at least one box to learn from."""
    image_size, test_size = (round_up(size, stride) for size in opt.img_size)
    fast = fastpaths.loader_options(opt, first_epoch)
    train_loader, dataset = create_dataloader(
        data.train, image_size, opt.batch_size, stride, opt, hyp=hyp, augment=True, cache=opt.cache_images,
        rect=opt.rect, rank=ranks.rank, world_size=ranks.world_size, workers=opt.workers,
        image_weights=opt.image_weights, quad=opt.quad, prefix="train: ", **fast,
    )  # fmt: skip
    check_labels(dataset, data, opt.strict_data)
    if opt.total_batch_size > len(dataset):
        logger.warning("--batch-size %d: there are only %d training images", opt.total_batch_size, len(dataset))
    if not opt.allow_background:
        check_has_boxes(dataset.labels, dataset.label_files)
    if not ranks.is_main:
        return Loaders(train_loader, None, dataset, image_size)
    val_loader, val_set = create_dataloader(
        data.val, test_size, opt.test_batch_size or opt.batch_size * 2, stride, opt, hyp=hyp,
        cache=not opt.notest and opt.cache_images, rect=True, pad=0.5, world_size=ranks.world_size,
        workers=opt.workers, prefix="val: ", **fast,
    )  # fmt: skip
    check_labels(val_set, data, opt.strict_data)
    return Loaders(train_loader, val_loader, dataset, image_size)


def choose_images(epoch, opt, loaders, class_weights, maps, ranks, device):
    """Before an epoch: draw its images (--image-weights), shuffle anew among the processes of a distributed run."""
    seed_epoch(opt.seed, epoch)
    if opt.image_weights:
        labels = loaders.dataset.labels
        indices = draw_image_indices(labels, class_weights.cpu(), maps) if ranks.is_main else [0] * len(labels)
        loaders.dataset.indices = dist.broadcast_indices(indices, ranks.rank, device)
    if ranks.is_distributed:
        loaders.train.sampler.set_epoch(epoch)


if __name__ == "__main__":
    parser = train_parser()
    opt = parser.parse_args()
    cli.run(main, opt)
