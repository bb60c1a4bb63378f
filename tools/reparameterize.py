"""Turn trained weights into their deploy form: the same detections, without implicit knowledge and auxiliary heads.

    python tools/reparameterize.py runs/train/exp/weights/best.pt

writes best_deploy.pt beside it, in stock YOLOv7's layout. The file of cfg/deploy is found by trying: it is the one
whose network gives the same boxes. Classes, names and anchors are those of the weights.
"""

import argparse
import logging
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.experimental import attempt_load, rebuild
from models.reparam import reparameterize
from models.yolo import Detect, IDetect
from utils.config.data_yaml import read_yaml
from utils.engine.checkpoint import save
from utils.engine.checkpoint_reader import check_finite, read_checkpoint
from utils.export.compare import batches, beyond_rounding, describe, images_to_compare, largest_differences
from utils.run import entry
from utils.system.files import PROJECT_ROOT, check_file, check_replaceable, folded
from utils.system.streams import quiet_loggers

logger = logging.getLogger("reparameterize")

SIDE = 256  # pixels of the images that both models see; a multiple of every stride


def load_training_model(path):
    """The un-fused float32 model of a training checkpoint; ValueError for one that has no deploy form."""
    stored = read_checkpoint(path).for_inference()
    check_finite(stored, path)
    model = rebuild(stored, path)
    head = model.model[-1]
    if type(head) is Detect:
        raise ValueError(f"{path} is in deploy form already (its head is Detect): export it or detect with it as it is")
    if not isinstance(head, IDetect):
        raise ValueError(f"{path} has a {type(head).__name__}, which has no deploy form; export.py takes it as it is")
    return model


def differences(model, other, images):
    """Of boxes and scores, on random numbers and on the images; see `largest_differences`."""
    noise = torch.rand(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    inputs = [noise, *batches(images, noise.shape)]
    return largest_differences(lambda batch: other(batch)[0], lambda batch: model(batch)[0], inputs)


def candidates(model):
    """The files of cfg/deploy with as many rows as the model, or as many as it has without its auxiliary inputs."""
    head = model.model[-1]
    num_auxiliary = head.nl if len(head.f) == 2 * head.nl else 0
    for path in sorted((PROJECT_ROOT / "cfg" / "deploy").glob("*.yaml")):
        content = read_yaml(path)
        if len(content["backbone"]) + len(content["head"]) == len(model.model) - num_auxiliary:
            yield path


def find_deploy_model(model, cfgs, images):
    """The deploy twin by the first of `cfgs` that computes the same as the model; ValueError if there is none."""
    reasons = []
    for cfg in cfgs:
        try:
            with quiet_loggers("models"):
                twin = reparameterize(model, cfg)
        except ValueError as error:
            reasons.append(str(error))
            continue
        worst = differences(model, twin, images)
        if not beyond_rounding(worst):
            logger.info("%s", folded(f"{cfg}, largest differences: {describe(worst)}"))
            return twin
        reasons.append(f"{cfg} computes something else: {describe(worst)}")
    raise ValueError("; ".join(reasons) or "no file of cfg/deploy has this network; give the deploy yaml by --cfg")


def main(opt):
    if not Path(opt.weights).name:
        raise ValueError("give the path of a .pt file, the checkpoint of a training")
    path = Path(opt.out or Path(opt.weights).with_stem(f"{Path(opt.weights).stem}_deploy"))
    check_replaceable(path, "--out", (".pt", ".pth", Path(opt.weights).suffix.lower()), [opt.weights])
    model = load_training_model(opt.weights)
    images, shown = images_to_compare(opt.source)
    logger.info("Compared on random numbers and %s", shown)
    cfgs = [check_file(opt.cfg, (".yaml", ".yml"))] if opt.cfg else candidates(model)
    twin = find_deploy_model(model, cfgs, images)
    twin.requires_grad_(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    save({"model": twin.half(), "optimizer": None, "training_results": None, "epoch": -1}, path)
    worst = differences(attempt_load(opt.weights), attempt_load(path), images)
    said = f"{path}, largest differences of the two files, in half precision: {describe(worst)}"
    logger.info("%s", folded(said))


def parser():
    parser = argparse.ArgumentParser("reparameterize.py", description="Turn trained weights into their deploy form.")
    add = parser.add_argument
    add("weights", help="checkpoint of a training")
    add("--out", default="", help="the file to write; default: NAME_deploy.pt beside the weights")
    add("--cfg", default="", help="deploy yaml, for a network that cfg/deploy does not have")
    add("--source", default="", help="image, folder or pattern to compare on; default a drawn image")
    return parser


if __name__ == "__main__":
    entry.run(main, parser().parse_args())
