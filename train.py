"""Train a YOLOv7 detector: everything that happens to a run, in order.

python train.py --data data/coco.yaml --cfg cfg/training/yolov7-tiny.yaml --hyp data/hyp.scratch.tiny.yaml --img 320
"""

import gc
import logging
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # before torch is imported, which takes as long
    from utils.system import byte_code, driver, signals

    signals.quiet_interrupt()
    gc.disable()  # or Python would look for garbage among all that it imports, again and again
    driver.start_ahead(sys.argv[1:])
    byte_code.keep_ahead(sys.argv[1:])

import numpy as np
from torch.optim.lr_scheduler import LambdaLR

from models.experimental import rebuild
from models.yolo import Model
from test import score_checkpoint
from utils import head_config
from utils.config.data_yaml import check_same_names, load_data_yaml
from utils.config.hyp import load_hyp, save_hyp, scale_hyp
from utils.config.options import save_options, train_parser
from utils.data.sampler import draw_image_indices, labels_to_class_weights
from utils.engine import early_stopping, overfit, resume
from utils.engine import optimizer as optim
from utils.engine.autoanchor import check_anchors
from utils.engine.batches import FromStart, Trainable, multi_scaled
from utils.engine.checkpoint import NoCheckpoints
from utils.engine.checkpoint_reader import check_finite, read_checkpoint, take_body, transfer
from utils.engine.ema import ModelEMA
from utils.engine.evaluate import evaluate, log_scores
from utils.engine.trainer import Trainer, freeze_layers
from utils.loggers.results import open_report
from utils.loss.multi_head import has_several_heads
from utils.metrics.detection import fitness
from utils.metrics.multi_head import heads_of, score_heads
from utils.run import auto_batch, entry, fast_paths
from utils.run.closing import log_result
from utils.run.context import Run
from utils.run.evolve import evolve
from utils.run.folder import open_run_folder, prepare_train_options
from utils.run.loaders import open_loaders
from utils.system import distributed, folder_lock, random_state
from utils.system.watch import Watch

logger = logging.getLogger("train")


def main(opt):
    """Prepare options and processes, then train once, or as often as --evolve asks."""
    ranks = distributed.read_ranks(opt.local_rank)
    if opt.verbose and ranks.is_main:
        for package in ("models", "utils"):
            logging.getLogger(package).setLevel(logging.DEBUG)
    opt = prepare_train_options(opt, ranks)
    os.chdir(opt.working_dir)  # of a resumed run: its relative paths mean what they meant when it was started
    hyp, data = load_hyp(opt.hyp), load_data_yaml(opt.data, opt.single_cls)
    head_config.of_options(opt, data.nc)  # before anything is written
    run = Run(opt, hyp, data, distributed.select_device(opt.device, opt.batch_size, ranks), ranks)
    explain = fast_paths.diagnosis()
    if explain:
        print(explain(build_model(run)[0], hyp, data.nc, opt.img_size[0]))
        return
    several = ranks.world_size > 1
    watch = Watch.of_process(ranks.rank, ranks.world_size, opt.loader_timeout, run.device) if several else None
    distributed.start_processes(ranks, run.device)
    run.check_alike()
    auto_batch.settle(run, lambda: build_model(run)[0])
    if opt.evolve:
        open_run_folder(opt, ranks)
        evolve(lambda changed: train(replace(run, hyp=changed)), hyp, opt.save_dir, opt.evolve)
    else:
        train(run)
    if watch:
        watch.stop()
    distributed.stop_processes()


def train(given):
    """One training run. Returns the last validation: P, R, mAP@.5, mAP@.5:.95, box, obj and cls loss."""
    run = given.adapted()
    opt, device, ranks = run.options, run.device, run.ranks
    distributed.init_seeds(2 + ranks.rank)
    paths = fast_paths.choose(opt, device)
    model, stored = build_model(run)
    freeze_layers(model, opt.freeze)
    trainer, progress = open_trainer(run, model, stored)
    steps = paths.steps(trainer)

    stride = max(int(model.stride.max()), 32)
    loaders = open_loaders(run, paths, stride, progress.start_epoch, lambda: build_model(run)[0])
    resume.note_images(progress, loaders.dataset.img_files, opt)
    run.check_alike(model, loaders.dataset.labels)
    report, checkpoints = open_records(given, paths, progress, steps.scalars, heads_of(model))
    if not opt.resume:
        report.labels(loaders.dataset.labels)
        if ranks.is_main:  # the other processes receive the anchors with the weights
            check_anchors(loaders.dataset, model, run.hyp["anchor_t"], loaders.sizes.final, refit=not opt.noautoanchor)
            trainer.ema.copy_anchors(model)
        model.half().float()  # stock behaviour: a fresh run starts from weights rounded to half precision
    loaders.begin()
    prepare_model(run, model, loaders.dataset.labels, loaders.sizes.final)
    if not opt.resume:
        checkpoints.initial(model)

    num_batches = len(loaders.train)
    num_warmup = optim.warmup_length(run.hyp, num_batches, progress.epochs)
    loss_of_epoch, validation_loss = paths.losses(model, progress.epochs)
    loss_factor = ranks.world_size * (4 if opt.quad else 1)
    if opt.overfit:
        loss_factor *= overfit.batch_weight(len(loaders.dataset), opt.total_batch_size)
    called = paths.data_parallel(model, device, ranks, opt.device, opt.sync_bn)
    paths.compile(called, report.exclude)
    trainer.start(called, loss_of_epoch(progress.start_epoch), loss_factor, progress.start_epoch, num_warmup,
                  paths.forward(called))  # fmt: skip
    paths.ahead(steps, (min(opt.batch_size, len(loaders.dataset)), 3, loaders.image_size, loaders.image_size),
                num_batches * (progress.epochs - progress.start_epoch))  # fmt: skip
    validate = partial(validate_ema, run, paths, trainer.ema, FromStart(loaders.val), validation_loss, steps.with_room)

    started = time.monotonic()
    trainable = Trainable(int(model.stride.max()), ranks.world_size > 1)
    random_state.resume(progress, ranks)
    for epoch in early_stopping.epochs_to_train(progress, opt.patience):
        if loaders.enter(epoch):  # another image size
            prepare_model(run, model, loaders.dataset.labels, loaders.image_size)
            loss_of_epoch, _ = paths.losses(model, progress.epochs)
        trainer.compute_loss = loss_of_epoch(epoch)
        choose_images(run, epoch, loaders, model.class_weights, progress.maps)
        batches = paths.batches(loaders.train, device)
        if opt.multi_scale:
            batches = multi_scaled(batches, loaders.image_size, stride)
        rates = train_one_epoch(epoch, num_batches, trainable(batches), steps, report)
        progress.trained, progress.random_states = progress.trained + 1, random_state.of_all_ranks(ranks)
        if ranks.is_main or paths.shares_validation:
            finish_epoch(epoch, rates, opt, trainer, progress, validate, steps.with_room, report, checkpoints)
    steps.finish()
    finish_run(run, loaders, report, checkpoints, progress, time.monotonic() - started)
    return progress.results


def finish_run(run, loaders, report, checkpoints, progress, seconds):
    """After the last epoch: plots, the official score on COCO, weights for inference, and what the run achieved."""
    report.last_plots()  # are drawn while the weights are made
    closing = loaders.close()  # so is this done meanwhile
    try:
        for path in checkpoints.written() if run.data.is_coco and run.data.nc == 80 else ():
            score_checkpoint(path, run.data, run.options, loaders.val.dataset.img_size, iou_thres=0.7)
        checkpoints.strip(rebuild)
        closing.join()
    finally:
        report.finish()
    if run.ranks.is_main:
        log_result(run.options, progress, report.clock, seconds, checkpoints.written())


def train_one_epoch(epoch, num_batches, batches, steps, report):
    """Every batch of an epoch: forward, loss, backward, and an optimiser step each `accumulate` batches.

    Returns the learning rates that it ended with.
    """
    steps.begin_epoch()
    for i, batch in enumerate(report.epoch(epoch, batches, num_batches)):
        items = steps.step(i + num_batches * epoch, epoch, batch)
        report.batch(items, batch.images, batch.targets, batch.paths)
    report.end_training(steps.late_items())
    return steps.end_epoch()


def finish_epoch(epoch, rates, opt, trainer, progress, validate, with_room, report, checkpoints):
    """Validate the moving average when this epoch asks for it, write the results and the checkpoints."""
    trainer.ema.update_attr(trainer.model, include=("yaml", "nc", "hyp", "gr", "names", "stride", "class_weights"))
    is_last = epoch + 1 == progress.epochs
    is_tested = is_last or early_stopping.is_tested(epoch, opt)
    if is_tested:
        progress.results, progress.maps, heads = validate(f"val   {epoch}/{progress.epochs - 1}", is_last)
        progress.tested_epoch = epoch
        report.heads_done(heads)
    folder_lock.keep(opt.save_dir)
    checkpoints.wait()  # or a kill could lose more than this epoch
    report.epoch_done(progress.results, rates, progress.maps if is_tested else None)
    score_now = float(fitness(np.array(progress.results)))
    is_best = is_tested and score_now >= progress.best_fitness
    progress.best_fitness = max(progress.best_fitness, score_now)
    progress.best_epoch = epoch if is_best else progress.best_epoch
    content = partial(resume.checkpoint, trainer, epoch, progress, report.results_text(), opt, checkpoints.copies)
    with_room(checkpoints.after_epoch)(content, epoch, is_best)
    if early_stopping.is_due(progress.best_epoch, progress.tested_epoch, opt.patience) and not is_last:
        validate("val", True)  # this was the last epoch after all: its plots


def validate_ema(run, paths, ema, loader, compute_loss, with_room, title, is_last):
    """Score the moving average (in half precision on a GPU); returns results, AP of classes, HeadScores."""
    opt, names = run.options, run.data.names
    is_drawn = is_last and not opt.evolve
    plot_dir = opt.save_dir if run.ranks.is_main else None  # the others have a share of the images, and of no scores
    scoring = partial(paths.drawn(evaluate), plot_dir=plot_dir) if is_drawn else paths.evaluate
    model = with_room(ema.ema_for_evaluation)(half=run.device.type == "cuda")
    evaluation = paths.together(scoring, with_room)(
        model, loader, run.data.nc, names, single_cls=opt.single_cls,
        compute_loss=compute_loss, v5_metric=opt.v5_metric,
    )  # fmt: skip
    heads = score_heads(evaluation.scores, heads_of(ema.ema))
    log_scores(evaluation.scores, names, is_last and 1 < run.data.nc < 50, heads, title)
    return evaluation.results, evaluation.maps, heads


def build_model(run):
    """The model to train, and the Checkpoint it starts from (None from scratch)."""
    opt, nc, anchors = run.options, run.data.nc, run.hyp.get("anchors")
    build = partial(Model, ch=3, nc=nc, anchors=anchors)
    heads = None if opt.resume else head_config.of_options(opt, nc)  # a resumed model says it itself
    if not opt.weights:
        return build(opt.cfg, head_config=heads).to(run.device), None
    stored = read_checkpoint(opt.weights)
    source = stored.for_training()
    check_finite(source, opt.weights)
    if not opt.cfg and source.yaml is None:
        raise ValueError(f"{opt.weights} does not say which model it belongs to; give --cfg")
    if heads is None and not opt.cfg:
        heads = head_config.of_model_yaml(source.yaml, opt.weights)
    model = build(opt.cfg or source.yaml, head_config=heads).to(run.device)
    if opt.transfer_weights and not opt.resume:
        take_body(model, source.state, opt.weights)
        return model, None
    keep_anchors = (opt.cfg or anchors) and not opt.resume
    num_taken = transfer(model, source.state, exclude=("anchor",) if keep_anchors else ())
    logger.info("Transferred %d/%d items from %s", num_taken, len(model.state_dict()), opt.weights)
    return model, stored


def open_trainer(run, model, stored):
    """The Trainer of a model, with the state of the Checkpoint `stored` if it has one, and the Progress of the run."""
    opt, hyp = run.options, run.hyp
    if stored and not opt.single_cls:
        names = stored.for_training().attributes.get("names")
        check_same_names(run.data, names, opt.weights, opt.strict_data, same_data=opt.resume)
    if has_several_heads(model) and hyp.get("loss_ota", 1) and opt.ota_last is None:
        logger.info("several heads: the plain loss is used, OTA needs --ota-last")
    # see overfit.batch_weight
    step_batch = optim.NOMINAL_BATCH if opt.overfit else opt.total_batch_size
    decay = optim.scaled_weight_decay(hyp["weight_decay"], step_batch)
    optimizer = optim.build_optimizer(model, hyp["lr0"], hyp["momentum"], decay, opt.adam)
    scheduler = LambdaLR(optimizer, optim.lr_factor(opt.epochs, hyp["lrf"], opt.linear_lr))
    trainer = Trainer(model, hyp, step_batch, optimizer, scheduler, ModelEMA(model), opt.amp)
    if opt.overfit:
        overfit.quicken_statistics(model)  # not of the average, which becomes the weights for inference
    progress = trainer.restore(stored, opt.epochs, run.data.nc, opt.resume)
    if progress.epochs != opt.epochs:  # the schedule ends where the run ends
        scheduler.lr_lambdas = [optim.lr_factor(progress.epochs, hyp["lrf"], opt.linear_lr)] * 3
    if opt.resume:
        resume.restore(stored, trainer, progress, opt)
    random_state.resume(progress, run.ranks)  # new loader workers must not draw what was drawn already
    return trainer, progress


def prepare_model(run, model, labels, image_size):
    """Attach to the model what its losses and its checkpoints need; `labels` of all training images."""
    nc, head = run.data.nc, model.model[-1]
    model.nc, model.names, model.gr = nc, run.data.names, 1.0
    model.hyp = scale_hyp(run.hyp, head.nl, nc, image_size, run.options.label_smoothing)
    model.class_weights = labels_to_class_weights(labels, nc).to(next(model.parameters()).device) * nc


def open_records(given, paths, progress, scalars, heads=()):
    """Report, with `scalars()`, and checkpoints of this process; the main one writes hyp.yaml and opt.yaml as given.

    The run folder appears here, when all input has been found good.
    """
    opt, ranks = given.options, given.ranks
    open_run_folder(opt, ranks)
    folder = Path(opt.save_dir)
    report, checkpoints = open_report(opt, given.data.names, ranks, heads), NoCheckpoints()
    report.also(scalars)
    if ranks.is_main and not opt.resume:
        save_hyp(given.hyp, folder / "hyp.yaml")  # not the adapted ones: a resumed run adapts them again
        save_options(opt, folder / "opt.yaml")
    if ranks.is_main and not opt.evolve:
        checkpoints = paths.checkpoints(folder / "weights", progress.epochs, not opt.nosave, opt.save_period)
    if progress.start_epoch:
        report.resume(progress.results_text, progress.epochs)
    return report, checkpoints


def choose_images(run, epoch, loaders, class_weights, maps):
    """Before an epoch: draw its images (--image-weights), shuffle anew among the processes of a distributed run."""
    opt, ranks = run.options, run.ranks
    random_state.seed_epoch(opt.seed, epoch)
    if opt.image_weights:
        labels = loaders.dataset.labels
        indices = draw_image_indices(labels, class_weights.cpu(), maps) if ranks.is_main else None
        loaders.dataset.indices = distributed.from_rank_zero(indices)
    if ranks.is_distributed:
        loaders.train.sampler.set_epoch(epoch)


if __name__ == "__main__":
    parser = train_parser()
    opt = parser.parse_args()
    gc.freeze()  # nor later: what is imported stays
    gc.enable()
    entry.run(main, opt)
    if driver.wants_speed(sys.argv[1:]) and driver.LAUNCHED not in os.environ:  # processes of several end as usual
        entry.leave()
