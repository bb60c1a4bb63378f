"""Score a YOLOv7 detector on a data set.

python test.py --weights runs/train/exp/weights/best.pt --data data/coco.yaml --img 320
"""

import json
import logging
from pathlib import Path

if __name__ == "__main__":  # before what takes seconds to import
    from utils.system import signals

    signals.quiet_interrupt()

import numpy as np
import torch

from models.experimental import attempt_load
from utils.config.data_yaml import check_same_names, load_data_yaml
from utils.config.flags import TEST_FLAGS
from utils.config.options import check_img_size, check_run_options, test_parser
from utils.data.labels.scan import check_labels
from utils.datasets import create_dataloader
from utils.engine.evaluate import CONF_THRES, IOU_THRES, evaluate, log_scores
from utils.metrics import coco
from utils.metrics.multi_head import heads_of, score_heads
from utils.metrics.text_files import TextFiles
from utils.plots.run import plot_study, wait_for_background
from utils.run import entry
from utils.run.folder import OTHER_FOLDER
from utils.system.distributed import select_device
from utils.system.files import atomic_write, check_can_be_made, check_file, check_replaceable, counted, increment_path
from utils.system.folder_lock import check_free, own

logger = logging.getLogger("test")

SPLITS = ("train", "val", "test")  # the other tasks score many times


def open_loader(opt, data, split, image_size, stride, batch_size):
    """The loader of a split of the data set: rectangular batches, half a stride of grey around."""
    path = getattr(data, split)
    if not path:
        raise ValueError(f"{opt.data} has no '{split}' entry to score")
    loader, dataset = create_dataloader(
        path, image_size, batch_size, stride, opt, pad=0.5, rect=True, prefix=f"{split}: ", keypoints=data.keypoints
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
    """Raise ValueError when the detector knows another number of classes than the data set, warn of other names."""
    if len(model.names) != data.nc and not opt.single_cls:
        raise ValueError(
            f"{weights[-1]} detects {counted(len(model.names), 'class', 'classes')}, but {opt.data} has {data.nc}; "
            "give the data yaml of its training, or --single-cls"
        )
    if not opt.single_cls:
        check_same_names(data, model.names, weights[-1], opt.strict_data, same_data=True)


def score(opt, weights, data, *, image_size, conf_thres, iou_thres, plots=True, save_json=False):
    """Load `weights`, score them on the split that opt.task names, print the table.

    Returns results (P, R, mAP@.5, mAP@.5:.95, box, obj, cls loss) and times (ms an image for inference, NMS and both,
    image height and width, batch size).
    """
    device = select_device(opt.device, opt.batch_size)
    model = attempt_load(weights, map_location=device)
    if opt.one_class_score:
        fix_one_class_scores(model)
    if device.type == "cuda":
        model.half()
    check_classes(model, weights, data, opt)
    stride = max(int(model.stride.max()), 32)
    image_size, names = check_img_size(image_size, stride), data.names
    split = opt.task if opt.task in SPLITS else "val"
    loader = open_loader(opt, data, split, image_size, stride, opt.batch_size)
    if device.type == "cuda":
        model(torch.zeros(1, 3, image_size, image_size, device=device).half())  # cuDNN's first call is slow

    if not opt.save_dir:  # all input has been found good
        opt.save_dir = str(increment_path(Path(opt.project) / opt.name, exist_ok=opt.exist_ok))
        own(opt.save_dir, OTHER_FOLDER)
    sinks, files = [], loader.dataset.img_files
    if (opt.save_txt or opt.save_hybrid) and opt.task in SPLITS:
        labels = Path(opt.save_dir) / "labels"
        sinks.append(TextFiles(labels, files, opt.save_conf, label_files=loader.dataset.label_files))
    coco_results = coco.open_results(data, split, names, files) if save_json else None
    if coco_results:
        sinks.append(coco_results)
    logger.info("NMS: --iou-thres %g, --conf-thres %g (validation of a training: %g, %g)", iou_thres, conf_thres,
                IOU_THRES, CONF_THRES)  # fmt: skip
    found = evaluate(
        model, loader, data.nc, names, conf_thres=conf_thres, iou_thres=iou_thres, single_cls=opt.single_cls,
        augment=opt.augment, hybrid=opt.save_hybrid, v5_metric=opt.v5_metric,
        plot_dir=opt.save_dir if plots else None, sinks=sinks,
    )  # fmt: skip
    heads = score_heads(found.scores, () if opt.single_cls else heads_of(model))
    log_scores(found.scores, names, (opt.verbose or data.nc < 50) and data.nc > 1, heads, split)
    results, times = found.results, (*found.times, image_size, image_size, opt.batch_size)
    logger.info("Speed: %.1f/%.1f/%.1f ms inference/NMS/total per %gx%g image at batch-size %g", *times)
    if coco_results:
        official = official_scores(coco_results, Path(opt.save_dir) / f"{Path(weights[0]).stem}_predictions.json")
        if official:  # stock behaviour: they take the place of our own mAP
            results = (*results[:2], official.ap50, official.ap, *results[4:])
    if opt.save_per_class_ap:
        save_class_ap(found.scores, names, opt.save_per_class_ap)
    return results, times


def score_checkpoint(path, data, train_opt, image_size, iou_thres):
    """Score a checkpoint of a run that has just ended, with a COCO json beside its results and no plots."""
    opt = test_parser().parse_args(["--device", train_opt.device, "--batch-size", str(train_opt.batch_size * 2)])
    opt.data, opt.save_dir = train_opt.data, train_opt.save_dir
    opt.single_cls, opt.v5_metric = train_opt.single_cls, train_opt.v5_metric
    return score(opt, [str(path)], data, image_size=image_size, conf_thres=0.001, iou_thres=iou_thres,
                 plots=False, save_json=True)  # fmt: skip


def official_scores(coco_results, path):
    """Write the detections to `path` and score them by COCO's own rules; None, said why, without annotations."""
    coco_results.write(path)
    try:
        return coco_results.score()
    except ValueError as error:
        logger.warning("%s is written, but has no official COCO score: %s", path, error)
        return None


def save_class_ap(scores, names, path):
    """A json file with mAP@.5, mAP@.5:.95 and the AP of every class that has labels."""
    columns = (scores.classes.tolist(), scores.class_ap50.tolist(), scores.class_ap.tolist())
    per_class = {c: {"ap50": ap50, "ap": ap, "name": names[c]} for c, ap50, ap in zip(*columns, strict=True)}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, "w") as file:
        json.dump({"map50": scores.map50, "map": scores.map, "per_class": per_class}, file, indent=1)


def main(opt):
    """The tasks of the command line: score one split; `speed`: time each of the weights; `study`: many image sizes.

    Returns P, R, mAP@.5, mAP@.5:.95, box, obj, cls loss of a split, None for a series.
    """
    check_run_options(opt, TEST_FLAGS)
    opt.data = check_file(opt.data)
    split = opt.task if opt.task in SPLITS else "val"
    data = load_data_yaml(opt.data, opt.single_cls, needed=(split,))
    check_can_be_made(opt.project)
    if opt.save_per_class_ap:
        read = data.annotations if isinstance(data.annotations, list) else [data.annotations or ""]
        check_replaceable(opt.save_per_class_ap, "--save-per-class-ap", (".json",), read, b'{\n "map50"')
    if opt.exist_ok:
        check_free(Path(opt.project) / opt.name, OTHER_FOLDER)
    opt.save_dir = ""
    for name in ("save_txt", "save_json", "save_per_class_ap") if opt.task not in SPLITS else ():
        if getattr(opt, name):  # each score would write over the one before
            logger.warning("--%s has no effect with --task %s", name.replace("_", "-"), opt.task)
            setattr(opt, name, None)
    results = None
    thresholds = {"conf_thres": opt.conf_thres, "iou_thres": opt.iou_thres}
    if opt.task == "speed":
        for weights in opt.weights:
            score(opt, [weights], data, image_size=opt.img_size, conf_thres=0.25, iou_thres=0.45, plots=False)
    elif opt.task == "study":
        study(opt, data, thresholds)
    else:
        wants_json = opt.save_json or data.is_coco
        results, _ = score(opt, opt.weights, data, image_size=opt.img_size, save_json=wants_json, **thresholds)
    wait_for_background()
    logger.info("Results saved to %s", opt.save_dir)
    return results


def study(opt, data, thresholds):
    """Accuracy and speed of each of the weights over image sizes: one text file each, and one plot."""
    files = []
    for weights in opt.weights:
        rows = []
        for image_size in range(256, 1536 + 128, 128):
            logger.info("Study: %s at %d px", weights, image_size)
            results, times = score(opt, [weights], data, image_size=image_size, plots=False, **thresholds)
            rows.append(results + times)
        path = Path(opt.save_dir) / f"study_{Path(opt.data).stem}_{Path(weights).stem}.txt"
        if path in files:  # two best.pt
            path = path.with_stem(f"{path.stem}_{len(files) + 1}")
        np.savetxt(path, rows, fmt="%10.4g")
        files.append(path)
    plot_study(files, Path(opt.save_dir) / "study.png")


if __name__ == "__main__":
    entry.run(main, test_parser().parse_args())
