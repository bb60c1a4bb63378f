"""Train a YOLOv7 detector: everything that happens to a run, in order.

python train.py --data data/coco.yaml --cfg cfg/training/yolov7-tiny.yaml --hyp data/hyp.scratch.tiny.yaml --img 320
"""

import logging
import time
from functools import partial
from pathlib import Path

import numpy as np
from torch.optim.lr_scheduler import LambdaLR

from models.experimental import rebuild
from models.yolo import Model
from test import score_checkpoint
from utils import head_config
from utils.config.data_yaml import load_data_yaml
from utils.config.hyp import load_hyp, save_hyp, scale_hyp
from utils.config.options import save_options, train_parser
from utils.data import subset
from utils.data.sampler import draw_image_indices, labels_to_class_weights
from utils.engine import early_stopping, resume
from utils.engine import optimizer as optim
from utils.engine.autoanchor import check_anchors
from utils.engine.batches import Trainable, multi_scaled
from utils.engine.checkpoint import NoCheckpoints
from utils.engine.checkpoint_reader import check_finite, read_checkpoint, take_body, transfer
from utils.engine.ema import ModelEMA
from utils.engine.evaluate import evaluate, log_scores
from utils.engine.trainer import Training, freeze_layers
from utils.fast.compile import explain
from utils.loggers.results import open_report
from utils.metrics.detection import fitness
from utils.metrics.multi_head import heads_of, score_heads
from utils.run import auto_batch, entry, fast_paths
from utils.run.evolve import evolve
from utils.run.folder import open_run_folder, prepare_train_options
from utils.run.loaders import open_loaders
from utils.system import distributed, random_state

logger = logging.getLogger("train")


def main(opt):
    """Prepare options and processes, then train once, or as often as --evolve asks."""
    ranks = distributed.read_ranks(opt.local_rank)
    opt = prepare_train_options(opt, ranks)
    hyp, data = load_hyp(opt.hyp), load_data_yaml(opt.data, opt.single_cls)
    head_config.of_options(opt, data.nc)  # before anything is written
    device = distributed.select_device(opt.device, opt.batch_size, ranks)
    if fast_paths.is_diagnosis():
        print(explain(build_model(opt, hyp, data, device)[0], hyp, data.nc, opt.img_size[0]))
        return
    distributed.start_processes(ranks, device)
    auto_batch.settle(opt, hyp, data, device, ranks, lambda: build_model(opt, hyp, data, device)[0], make_twin)
    if opt.evolve:
        open_run_folder(opt, ranks)
        evolve(partial(train, opt=opt, data=data, device=device, ranks=ranks), hyp, opt.save_dir, opt.evolve)
    else:
        train(hyp, opt, data, device, ranks)
    distributed.stop_processes()


def train(hyp, opt, data, device, ranks):
    """One training run. Returns the last validation: P, R, mAP@.5, mAP@.5:.95, box, obj and cls loss."""
    distributed.init_seeds(2 + ranks.rank)
    paths = fast_paths.choose(opt, device, make_twin)
    given_hyp = hyp  # what hyp.yaml keeps: a resumed run changes it again
    hyp = subset.overfit_hyp(hyp) if opt.overfit else hyp
    if opt.auto_lr:
        hyp = optim.for_large_batch(hyp, opt.total_batch_size)

    model, stored = build_model(opt, hyp, data, device)
    freeze_layers(model, opt.freeze)
    training, progress = open_training(model, stored, hyp, opt, data.nc, ranks)
    steps = paths.steps(training)

    stride = max(int(model.stride.max()), 32)
    loaders = open_loaders(opt, hyp, data, stride, ranks, progress.start_epoch, device)
    report, checkpoints = open_records(opt, given_hyp, data, ranks, progress, heads_of(model))
    report.also(steps.scalars)
    if not opt.resume:
        report.labels(loaders.dataset.labels)
        if ranks.is_main:  # the other processes receive the anchors with the weights
            check_anchors(loaders.dataset, model, hyp["anchor_t"], loaders.sizes.final, refit=not opt.noautoanchor)
            training.ema.copy_anchors(model)
        model.half().float()  # stock behaviour: a fresh run starts from weights rounded to half precision
    prepare_model(model, hyp, opt, data, loaders.dataset.labels, loaders.sizes.final)
    if not opt.resume:
        checkpoints.initial(model)

    num_batches = len(loaders.train)
    num_warmup = optim.warmup_length(hyp, num_batches, progress.epochs)
    loss_of_epoch, validation_loss = paths.losses(model, progress.epochs)
    loss_factor = ranks.world_size * (4 if opt.quad else 1) * subset.batch_weight(opt, len(loaders.dataset))
    called = distributed.data_parallel(model, device, ranks, opt.device, opt.sync_bn)
    fast_paths.compile_model(called, opt, report.exclude)
    training.start(called, loss_of_epoch(progress.start_epoch), loss_factor, progress.start_epoch, num_warmup)
    quick = fast_paths.validation(opt)
    validate = partial(validate_ema, training.ema, loaders.val, data, validation_loss, opt, device, quick)

    started = time.monotonic()
    trainable = Trainable(int(model.stride.max()))
    random_state.resume(progress, ranks)
    for epoch in early_stopping.epochs_to_train(progress, opt.patience, ranks, device):
        if loaders.enter(epoch):  # another image size
            prepare_model(model, hyp, opt, data, loaders.dataset.labels, loaders.image_size)
            loss_of_epoch, _ = paths.losses(model, progress.epochs)
        training.compute_loss = loss_of_epoch(epoch)
        choose_images(epoch, opt, loaders, model.class_weights, progress.maps, ranks, device)
        batches = paths.feed(loaders.train, device)
        if opt.multi_scale:
            batches = multi_scaled(batches, loaders.image_size, stride)
        rates = train_one_epoch(epoch, num_batches, trainable(batches), steps, report)
        progress.trained, progress.random_states = progress.trained + 1, random_state.of_all_ranks(ranks)
        if ranks.is_main:
            finish_epoch(epoch, rates, opt, training, progress, validate, report, checkpoints)
    steps.finish()
    hours = (time.monotonic() - started) / 3600
    logger.info("%d epochs completed in %.3f hours", progress.trained, hours)
    finish_run(opt, data, loaders, report, checkpoints)
    return progress.results


def finish_run(opt, data, loaders, report, checkpoints):
    """After the last epoch: plots, the official score on COCO, weights for inference."""
    report.finish()
    for path in checkpoints.written() if data.is_coco and data.nc == 80 else ():
        score_checkpoint(path, data, opt, loaders.val.dataset.img_size, iou_thres=0.7)
    checkpoints.strip(rebuild)


def train_one_epoch(epoch, num_batches, batches, training, report):
    """Every batch of an epoch: forward, loss, backward, and an optimiser step each `accumulate` batches.

    Returns the learning rates that it ended with.
    """
    training.begin_epoch()
    for i, batch in enumerate(report.epoch(epoch, batches, num_batches)):
        items = training.step(i + num_batches * epoch, epoch, batch)
        report.batch(items, batch.images, batch.targets, batch.paths)
    report.losses(training.late_items())
    return training.end_epoch()


def finish_epoch(epoch, rates, opt, training, progress, validate, report, checkpoints):
    """Validate the moving average when this epoch asks for it, write the results and the checkpoints."""
    training.ema.update_attr(training.model, include=("yaml", "nc", "hyp", "gr", "names", "stride", "class_weights"))
    is_last = epoch + 1 == progress.epochs
    is_tested = is_last or early_stopping.is_tested(epoch, opt)
    if is_tested:
        progress.results, progress.maps, heads = validate(is_last)
        progress.tested_epoch = epoch
        report.heads_done(heads)
    checkpoints.wait()  # or a kill could lose more than this epoch
    report.epoch_done(progress.results, rates, progress.maps if is_tested else None)
    score_now = float(fitness(np.array(progress.results)))
    is_best = is_tested and score_now >= progress.best_fitness
    progress.best_fitness = max(progress.best_fitness, score_now)
    progress.best_epoch = epoch if is_best else progress.best_epoch
    content = partial(resume.checkpoint, training, epoch, progress, report.results_text(), opt)
    checkpoints.after_epoch(content, epoch, is_best)
    if early_stopping.is_due(progress.best_epoch, progress.tested_epoch, opt.patience) and not is_last:
        validate(True)  # this was the last epoch after all: its plots


def validate_ema(ema, loader, data, compute_loss, opt, device, quick, is_last):
    """Score the moving average (in half precision on a GPU); returns results, AP of classes, HeadScores.

    `quick` (None: `evaluate`) scores without plots, so the last validation goes without it.
    """
    is_drawn = is_last and not opt.evolve
    run = quick if quick and not is_drawn else partial(evaluate, plot_dir=opt.save_dir if is_drawn else None)
    evaluation = run(
        ema.ema_for_evaluation(half=device.type == "cuda"), loader, data.nc, data.names, single_cls=opt.single_cls,
        compute_loss=compute_loss, v5_metric=opt.v5_metric,
    )  # fmt: skip
    heads = score_heads(evaluation.scores, heads_of(ema.ema))
    log_scores(evaluation.scores, data.names, is_last and 1 < data.nc < 50, heads)
    return evaluation.results, evaluation.maps, heads


def build_model(opt, hyp, data, device):
    """The model to train, and the Checkpoint it starts from (None from scratch)."""
    build = partial(Model, ch=3, nc=data.nc, anchors=hyp.get("anchors"))
    heads = None if opt.resume else head_config.of_options(opt, data.nc)  # a resumed model says it itself
    if not opt.weights:
        return build(opt.cfg, head_config=heads).to(device), None
    stored = read_checkpoint(opt.weights)
    source = stored.model or stored.ema
    check_finite(source, opt.weights)
    if not opt.cfg and source.yaml is None:
        raise ValueError(f"{opt.weights} does not say which model it belongs to; give --cfg")
    if heads is None and not opt.cfg:
        heads = head_config.of_model_yaml(source.yaml, opt.weights)
    model = build(opt.cfg or source.yaml, head_config=heads).to(device)
    if opt.transfer_weights and not opt.resume:
        take_body(model, source.state, opt.weights)
        return model, None
    keep_anchors = (opt.cfg or hyp.get("anchors")) and not opt.resume
    num_taken = transfer(model, source.state, exclude=("anchor",) if keep_anchors else ())
    logger.info("Transferred %d/%d items from %s", num_taken, len(model.state_dict()), opt.weights)
    return model, stored


def make_twin(model):
    """The form of `model` that trains fastest on a GPU; imported only then, for it needs Triton."""
    from models.fused import training_twin

    return training_twin(model)


def open_training(model, stored, hyp, opt, nc, ranks):
    """The Training of a model, with the state of the Checkpoint `stored` if it has one, and the Progress of the run."""
    if opt.overfit:
        subset.quicken_statistics(model)
    # see subset.batch_weight
    step_batch = optim.NOMINAL_BATCH if opt.overfit else opt.total_batch_size
    decay = optim.scaled_weight_decay(hyp["weight_decay"], step_batch)
    optimizer = optim.build_optimizer(model, hyp["lr0"], hyp["momentum"], decay, opt.adam)
    scheduler = LambdaLR(optimizer, optim.lr_factor(opt.epochs, hyp["lrf"], opt.linear_lr))
    training = Training(model, hyp, step_batch, optimizer, scheduler, ModelEMA(model), opt.amp)
    progress = training.restore(stored, opt.epochs, nc, opt.resume)
    if progress.epochs != opt.epochs:  # the schedule ends where the run ends
        scheduler.lr_lambdas = [optim.lr_factor(progress.epochs, hyp["lrf"], opt.linear_lr)] * 3
    if opt.resume:
        resume.restore(stored, training, progress, opt)
    random_state.resume(progress, ranks)  # new loader workers must not draw what was drawn already
    return training, progress


def prepare_model(model, hyp, opt, data, labels, image_size):
    """Attach to the model what its losses and its checkpoints need; `labels` of all training images."""
    model.nc, model.names, model.gr = data.nc, data.names, 1.0
    model.hyp = scale_hyp(hyp, model.model[-1].nl, data.nc, image_size, opt.label_smoothing)
    model.class_weights = labels_to_class_weights(labels, data.nc).to(next(model.parameters()).device) * data.nc


def open_records(opt, hyp, data, ranks, progress, heads=()):
    """Report and checkpoints of this process; the main one also writes hyp.yaml and opt.yaml, as they were given.

    The run folder appears here, when all input has been found good.
    """
    open_run_folder(opt, ranks)
    report, checkpoints = open_report(opt, data.names, ranks, heads), NoCheckpoints()
    if ranks.is_main and not opt.resume:
        save_hyp(hyp, Path(opt.save_dir) / "hyp.yaml")
        save_options(opt, Path(opt.save_dir) / "opt.yaml")
    if ranks.is_main and not opt.evolve:
        folder = Path(opt.save_dir) / "weights"
        checkpoints = fast_paths.checkpoints(opt)(folder, progress.epochs, not opt.nosave, opt.save_period)
    if progress.start_epoch:
        report.resume(progress.results_text, progress.epochs)
    return report, checkpoints


def choose_images(epoch, opt, loaders, class_weights, maps, ranks, device):
    """Before an epoch: draw its images (--image-weights), shuffle anew among the processes of a distributed run."""
    random_state.seed_epoch(opt.seed, epoch)
    if opt.image_weights:
        labels = loaders.dataset.labels
        indices = draw_image_indices(labels, class_weights.cpu(), maps) if ranks.is_main else [0] * len(labels)
        loaders.dataset.indices = distributed.broadcast_indices(indices, ranks.rank, device)
    if ranks.is_distributed:
        loaders.train.sampler.set_epoch(epoch)


if __name__ == "__main__":
    parser = train_parser()
    opt = parser.parse_args()
    entry.run(main, opt)
