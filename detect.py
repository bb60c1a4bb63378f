"""Detect objects in images, videos and streams with a YOLOv7 detector.

python detect.py --weights runs/train/exp/weights/best.pt --source images/ --img 640 --conf 0.25
"""

import logging
import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # before what takes seconds to import
    from utils.system import signals

    signals.quiet_interrupt()

from models.experimental import Ensemble, attempt_load
from utils.config.data_yaml import read_yaml
from utils.config.flags import DETECT_FLAGS
from utils.config.options import check_img_size, check_run_options, detect_parser
from utils.detect import writers
from utils.detect.loop import Window, check_window, detect, quiet_decoders
from utils.detect.names import find_items
from utils.detect.predict import Predictor, Thresholds
from utils.detect.sources import FileSource, prepare
from utils.detect.streams import StreamSource
from utils.metrics.coco import COCO_CATEGORY_IDS
from utils.plots.images import BoxStyle
from utils.run import entry
from utils.run.folder import OTHER_FOLDER
from utils.system import signals
from utils.system.distributed import select_device
from utils.system.files import PROJECT_ROOT, check_can_be_made, counted, folded, increment_path
from utils.system.folder_lock import check_free, own

logger = logging.getLogger(__name__)


def open_writers(opt, folder, names):
    """(all writers that the options ask for, the one that draws)."""
    style = BoxStyle(opt.line_thickness, not opt.hide_labels, not opt.hide_conf)
    pictures = writers.Pictures(folder, names, style, opt.show_counts)
    chosen = [] if opt.nosave else [pictures]
    if opt.save_txt:
        chosen.append(writers.LabelFiles(folder / "labels", opt.save_conf))
    if opt.save_csv:
        chosen.append(writers.CsvFile(folder / "detections.csv", names))
    if opt.save_json:
        chosen.append(writers.JsonFile(folder / "detections.json", names, category_ids(names)))
    if opt.save_crop:
        chosen.append(writers.Crops(folder / "crops", names))
    return chosen, pictures


def category_ids(names):
    """The category id of each class in a json: COCO's own for a detector of COCO's 80 classes, else the class id."""
    coco = read_yaml(PROJECT_ROOT / "data" / "coco.yaml")["names"]
    return COCO_CATEGORY_IDS if list(names) == coco else list(range(len(names)))


def check_classes(num_classes, names, opt):
    """Raise ValueError for a detector whose classes lack names, and for a class that it does not know."""
    if num_classes != len(names):
        raise ValueError(f"--weights {opt.weights[-1]} detects {num_classes} classes and has {len(names)} names")
    for class_id in opt.classes or ():
        if class_id >= len(names):
            raise ValueError(f"--classes {class_id}: the detector knows the classes 0 to {len(names) - 1}")


def open_predictor(opt):
    """The network of the weights, ready to detect; the names of its last model, the largest stride."""
    model = attempt_load(opt.weights, map_location=select_device(opt.device))
    last, names = model[-1] if isinstance(model, Ensemble) else model, model.names
    check_classes(last.model[-1].nc, names, opt)
    thresholds = Thresholds(opt.conf_thres, opt.iou_thres, opt.classes, opt.agnostic_nms)
    return Predictor(model, thresholds, opt.half, opt.augment), names, max(32, int(model.stride.max()))


def main(opt):
    """Detect as the options say, into a new folder; status 1 when files could not be read, 130 after Ctrl-C."""
    check_run_options(opt, DETECT_FLAGS)
    if opt.update:
        logger.warning("--update has no effect: best.pt and last.pt are stripped when a training ends")
    if opt.view_img:
        check_window()
    quiet_decoders()
    items = find_items(opt.source)
    check_can_be_made(opt.project)
    if opt.exist_ok:
        check_free(Path(opt.project) / opt.name, OTHER_FOLDER)
    predictor, names, stride = open_predictor(opt)
    prepare_image = partial(prepare, size=check_img_size(opt.img_size, stride), stride=stride)
    kind = StreamSource if items[0].kind == "stream" else FileSource
    source = kind(items, prepare_image, opt.batch_size)
    folder = increment_path(Path(opt.project) / opt.name, exist_ok=opt.exist_ok)
    own(folder, OTHER_FOLDER)
    chosen, pictures = open_writers(opt, folder, names)
    outcome = detect(source, predictor, names, chosen, num_items=len(items),
                     window=Window(pictures) if opt.view_img else None)  # fmt: skip
    logger.info("%s", folded(outcome.summary(names)))
    logger.info("Results saved to %s", folder)
    if outcome.faults:
        logger.warning("%s could not be read in whole, see above", counted(len(outcome.faults), "file"))
    if outcome.interrupted or outcome.faults:
        sys.exit(signals.status_of(outcome.interrupted) if outcome.interrupted else 1)


if __name__ == "__main__":
    entry.run(main, detect_parser().parse_args())
