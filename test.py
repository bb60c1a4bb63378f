"""Score a YOLOv7 detector on a data set.

python test.py --weights runs/train/exp/weights/best.pt --data data/coco.yaml --img 320
"""

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from models.experimental import attempt_load
from utils.config.data_yaml import load_data_yaml
from utils.config.options import check_test_options, round_up, test_parser
from utils.data.scan import check_labels
from utils.datasets import create_dataloader
from utils.loss.multi_head import in_float32
from utils.metrics import coco
from utils.metrics.detection import ConfusionMatrix, DetectionScores
from utils.metrics.multi_head import heads_of, score_heads
from utils.metrics.text_files import TextFiles
from utils.ops.boxes import scale_coords, xywh2xyxy
from utils.ops.nms import non_max_suppression
from utils.plots import run
from utils.plots.images import output_to_targets, plot_images
from utils.run import entry
from utils.system.distributed import select_device
from utils.system.files import atomic_write, check_can_be_made, check_file, increment_path

logger = logging.getLogger("test")

HEADER = ("%20s" + "%12s" * 6) % ("Class", "Images", "Labels", "P", "R", "mAP@.5", "mAP@.5:.95")
ROW = "%20s" + "%12i" * 2 + "%12.3g" * 4


@dataclass
class Evaluation:
    """Scores of a data set: `results` is P, R, mAP@.5, mAP@.5:.95, box, obj and cls loss; `maps` [nc] the AP of every
    class; `times` inference, NMS and total in ms an image."""

    results: tuple
    maps: np.ndarray
    times: tuple
    scores: object = None


@torch.no_grad()
def evaluate(model, loader, nc, names, *, conf_thres=0.001, iou_thres=0.6, single_cls=False, augment=False,
             compute_loss=None, hybrid=False, v5_metric=False, picture_dir=None, sinks=()):  # fmt: skip
    """Run `model` (in evaluation mode; its device and precision are used) over `loader` and score the detections.

    `compute_loss(maps, targets)` adds the validation losses. `picture_dir` asks for pictures there; each of `sinks` is
    given (path, detections, image shape) of every image. Returns an Evaluation.
    """
    weight = next(model.parameters())
    scores, confusion = DetectionScores(), ConfusionMatrix(nc)
    losses, clock = torch.zeros(3, device=weight.device), Clock(weight.device)
    for index, (images, targets, paths, shapes) in enumerate(tqdm(loader, desc=HEADER)):
        images, targets = images.to(weight.device, weight.dtype) / 255, targets.to(weight.device)
        shape = images.shape[2:]
        with clock("inference"):
            predictions, maps = model(images, augment=augment)
        if compute_loss is not None:
            losses += compute_loss(in_float32(maps), targets)[1][:3]
        in_pixels = targets * targets.new_tensor([1, 1, shape[1], shape[0], shape[1], shape[0]])
        known = [in_pixels[in_pixels[:, 0] == i, 1:] for i in range(len(images))] if hybrid else ()
        with clock("nms"):
            detections = non_max_suppression(predictions, conf_thres, iou_thres, labels=known, multi_label=True)
        detections, in_pixels = [rows.cpu() for rows in detections], in_pixels.cpu()
        for i, (rows, path, (original, ratio_pad)) in enumerate(zip(detections, paths, shapes, strict=True)):
            if single_cls:
                rows[:, 5] = 0
            native = to_native(rows, shape, original, ratio_pad)
            labels = in_pixels[in_pixels[:, 0] == i, 1:]
            boxes = scale_coords(shape, xywh2xyxy(labels[:, 1:5]), original, ratio_pad)
            labels = torch.cat((labels[:, :1], boxes), 1)
            scores.add(native, labels)
            confusion.process_batch(native, labels)
            for sink in sinks:
                sink.add(path, native, original)
        if picture_dir and index < 3:
            draw_batch(images, targets, detections, paths, names, Path(picture_dir) / f"test_batch{index}")

    summary = scores.summary(nc, v5_metric)
    if summary.problem:
        logger.warning("Validation: %s", summary.problem)
    if picture_dir:
        run.plot_curves(summary.curves, picture_dir, names)
        run.plot_confusion_matrix(confusion.matrix, names, picture_dir)
    times = clock.per_image(scores.num_images)
    losses = (losses / max(len(loader), 1)).tolist()
    results = (summary.precision, summary.recall, summary.map50, summary.map, *losses)
    return Evaluation(results, summary.maps, times, summary)


class Clock:
    """Seconds spent in named stages; waits for the GPU at the ends of each."""

    def __init__(self, device):
        self.device, self.seconds, self.stage, self.start = device, {"inference": 0.0, "nms": 0.0}, None, 0.0

    def __call__(self, stage):
        self.stage = stage
        return self

    def _now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def __enter__(self):
        self.start = self._now()

    def __exit__(self, *error):
        self.seconds[self.stage] += self._now() - self.start

    def per_image(self, num_images):
        """Milliseconds an image: inference, NMS, both."""
        inference, nms = (1e3 * seconds / max(num_images, 1) for seconds in self.seconds.values())
        return inference, nms, inference + nms


def to_native(detections, network_shape, image_shape, ratio_pad):
    """A copy of `detections` [k x 6] in pixels of the original image."""
    native = detections.clone()
    scale_coords(network_shape, native, image_shape, ratio_pad)
    return native


def draw_batch(images, targets, detections, paths, names, stem):
    """<stem>_labels.jpg and <stem>_pred.jpg, drawn in the background."""
    pixels = (images * 255).byte().cpu()
    found = output_to_targets(detections, *reversed(images.shape[2:]))
    run.in_background(plot_images, pixels, targets.cpu(), paths, f"{stem}_labels.jpg", names)
    run.in_background(plot_images, pixels, found, paths, f"{stem}_pred.jpg", names)


def log_scores(scores, names, per_class, heads=()):
    """The table of results: a row for all classes, one for each HeadScore and, when asked, each class with labels."""
    rows = [("all", scores.num_images, scores.num_labels, scores.precision, scores.recall, scores.map50, scores.map)]
    rows += [(head.name[:20], scores.num_images, *head[1:]) for head in heads]
    if per_class:
        columns = (scores.classes, scores.class_precision, scores.class_recall, scores.class_ap50, scores.class_ap)
        rows += [
            (names[c], scores.num_images, scores.labels_per_class[c], p, r, ap50, ap)
            for c, p, r, ap50, ap in zip(*columns, strict=True)
        ]
    for row in rows:
        logger.info(ROW, *row)


def open_loader(opt, data, split, image_size, stride, batch_size):
    """The loader of a split of the data set: rectangular batches, half a stride of grey around."""
    path = getattr(data, split)
    if not path:
        raise ValueError(f"{opt.data} has no '{split}' entry to score")
    loader, dataset = create_dataloader(
        path, image_size, batch_size, stride, opt, pad=0.5, rect=True, prefix=f"{split}: "
    )
    check_labels(dataset, data, opt.strict_data)
    return loader


def fix_one_class_scores(model):
    """Heads with a single class give it the score 1, in all models of an ensemble."""
    layers = [layer for layer in model.modules() if hasattr(layer, "fix_one_class_score")]
    for layer in layers:
        layer.fix_one_class_score(True)
    if not layers:
        logger.warning("--one-class-score has no effect: this model has one head")


def check_classes(model, weights, data, opt):
    """Raise ValueError when the detector knows another number of classes than the data set has."""
    if len(model.names) != data.nc and not opt.single_cls:
        raise ValueError(
            f"{weights[-1]} detects {len(model.names)} classes, but {opt.data} has {data.nc}; give the data yaml of "
            "its training, or --single-cls"
        )


def score(opt, weights, data, *, image_size, conf_thres, iou_thres, pictures=True, save_json=False):
    """Load `weights`, score them on the split that opt.task names, print the table; returns an Evaluation."""
    device = select_device(opt.device, opt.batch_size)
    model = attempt_load(weights, map_location=device)
    if opt.one_class_score:
        fix_one_class_scores(model)
    if device.type == "cuda":
        model.half()
    check_classes(model, weights, data, opt)
    stride = max(int(model.stride.max()), 32)
    image_size, names = round_up(image_size, stride), data.names
    split = opt.task if opt.task in ("train", "val", "test") else "val"
    loader = open_loader(opt, data, split, image_size, stride, opt.batch_size)
    if device.type == "cuda":
        model(torch.zeros(1, 3, image_size, image_size, device=device).half())  # cuDNN's first call is slow

    if not opt.save_dir:  # all input has been found good
        opt.save_dir = str(increment_path(Path(opt.project) / opt.name, exist_ok=opt.exist_ok))
    sinks = []
    if opt.save_txt or opt.save_hybrid:
        sinks.append(TextFiles(Path(opt.save_dir) / "labels", opt.save_conf))
    coco_results = coco.open_results(data, split, names, loader.dataset.img_files) if save_json else None
    if coco_results:
        sinks.append(coco_results)
    result = evaluate(
        model, loader, data.nc, names, conf_thres=conf_thres, iou_thres=iou_thres, single_cls=opt.single_cls,
        augment=opt.augment, hybrid=opt.save_hybrid, v5_metric=opt.v5_metric,
        picture_dir=opt.save_dir if pictures else None, sinks=sinks,
    )  # fmt: skip
    heads = score_heads(result.scores, () if opt.single_cls else heads_of(model))
    log_scores(result.scores, names, (opt.verbose or data.nc < 50) and data.nc > 1, heads)
    result.times = (*result.times, image_size, image_size, opt.batch_size)
    logger.info("Speed: %.1f/%.1f/%.1f ms inference/NMS/total per %gx%g image at batch-size %g", *result.times)
    if coco_results:
        path = Path(opt.save_dir) / f"{Path(weights[0]).stem}_predictions.json"
        coco_results.write(path)
        official = log_official_scores(coco_results, path)
        if official:  # stock behaviour: they take the place of our own mAP
            result.results = (*result.results[:2], official.ap50, official.ap, *result.results[4:])
    if opt.save_per_class_ap:
        save_class_ap(result.scores, names, opt.save_per_class_ap)
    return result


def score_checkpoint(path, data, train_opt, image_size, iou_thres):
    """Score a checkpoint of a run that has just ended, with a COCO json beside its results and no pictures."""
    opt = test_parser().parse_args(["--device", train_opt.device, "--batch-size", str(train_opt.batch_size * 2)])
    opt.data, opt.save_dir = train_opt.data, train_opt.save_dir
    opt.single_cls, opt.v5_metric = train_opt.single_cls, train_opt.v5_metric
    return score(opt, [str(path)], data, image_size=image_size, conf_thres=0.001, iou_thres=iou_thres,
                 pictures=False, save_json=True)  # fmt: skip


def log_official_scores(coco_results, path):
    """Score with COCO's own rules; returns CocoScores, or None, said why, without usable annotations."""
    try:
        official = coco_results.score()
    except ValueError as error:
        logger.warning("%s is written, but has no official COCO score: %s", path, error)
        return None
    return official


def save_class_ap(scores, names, path):
    """A json file with mAP@.5, mAP@.5:.95 and the AP of every class that has labels."""
    columns = (scores.classes.tolist(), scores.class_ap50.tolist(), scores.class_ap.tolist())
    per_class = {c: {"ap50": ap50, "ap": ap, "name": names[c]} for c, ap50, ap in zip(*columns, strict=True)}
    with atomic_write(path, "w") as file:
        json.dump({"map50": scores.map50, "map": scores.map, "per_class": per_class}, file, indent=1)


def main(opt):
    """The tasks of the command line: score one split; `speed`: time each of the weights; `study`: many image sizes."""
    check_test_options(opt)
    opt.data = check_file(opt.data)
    split = opt.task if opt.task in ("train", "val", "test") else "val"
    data = load_data_yaml(opt.data, opt.single_cls, needed=(split,))
    check_can_be_made(opt.project)
    opt.save_dir = ""
    thresholds = {"conf_thres": opt.conf_thres, "iou_thres": opt.iou_thres}
    if opt.task == "speed":
        for weights in opt.weights:
            score(opt, [weights], data, image_size=opt.img_size, conf_thres=0.25, iou_thres=0.45, pictures=False)
    elif opt.task == "study":
        study(opt, data, thresholds)
    else:
        wants_json = opt.save_json or data.is_coco
        score(opt, opt.weights, data, image_size=opt.img_size, save_json=wants_json, **thresholds)
    run.wait_for_background()
    logger.info("Results saved to %s", opt.save_dir)


def study(opt, data, thresholds):
    """Accuracy and speed of each of the weights over image sizes: one text file each, and one picture."""
    files = []
    for weights in opt.weights:
        rows = []
        for image_size in range(256, 1536 + 128, 128):
            logger.info("Study: %s at %d px", weights, image_size)
            result = score(opt, [weights], data, image_size=image_size, pictures=False, **thresholds)
            rows.append(result.results + result.times)
        path = Path(opt.save_dir) / f"study_{Path(opt.data).stem}_{Path(weights).stem}.txt"
        if path in files:  # two best.pt
            path = path.with_stem(f"{path.stem}_{len(files) + 1}")
        np.savetxt(path, rows, fmt="%10.4g")
        files.append(path)
    run.plot_study(files, Path(opt.save_dir) / "study.png")


if __name__ == "__main__":
    parser = test_parser()
    opt = parser.parse_args()
    entry.run(main, opt)
