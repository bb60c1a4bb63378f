"""Every flag of train.py and test.py, and the way of options into and out of opt.yaml."""

import argparse
import logging
from pathlib import Path

import yaml

from utils.config import limits, resize_schedule
from utils.config.data_yaml import read_yaml
from utils.system.files import atomic_write, shown

logger = logging.getLogger(__name__)

# Written to opt.yaml, but facts about one start of a run and no flags.
RUNTIME_KEYS = {"save_dir", "total_batch_size", "world_size", "global_rank"}


def train_parser():
    """The command line of train.py: stock's flags first, then ours, all of them off by default."""
    parser = argparse.ArgumentParser("train.py", description="Train a YOLOv7 detector.")
    group = parser.add_argument_group("what to train")
    add = group.add_argument
    add("--weights", default="", help="weights to start from (.pt); empty: from scratch")
    add("--cfg", default="", help="model yaml, e.g. cfg/training/yolov7-tiny.yaml; empty: the one inside --weights")
    add("--data", default="data/coco.yaml", help="data set yaml")
    add("--hyp", default="data/hyp.scratch.p5.yaml", help="hyper-parameter yaml")
    add("--epochs", type=int, default=300)
    add("--batch-size", type=int, default=16, help="images per step, over all GPUs; -1: what fits")
    add("--img-size", nargs="+", type=int, default=[640, 640], help="training and validation size in pixels")
    add("--single-cls", action="store_true", help="treat all classes as one")
    add("--freeze", nargs="+", type=layer_range, action=Flat, default=[0],
        help="N: the first N layers; several numbers or a range such as 29-76: those layers")  # fmt: skip
    add("--resume", nargs="?", const=True, default=False, help="continue the newest run, or the given last.pt")

    group = parser.add_argument_group("how to train")
    add = group.add_argument
    add("--rect", action="store_true", help="rectangular training batches (no mosaic)")
    add("--multi-scale", action="store_true", help="vary the image size by +-50%% from batch to batch")
    add("--image-weights", action="store_true", help="draw images by the classes that score worst")
    add("--quad", action="store_true", help="collate four images into one of double size")
    add("--adam", action="store_true", help="Adam instead of SGD")
    add("--linear-lr", action="store_true", help="linear learning rate schedule instead of cosine")
    add("--label-smoothing", type=float, default=0.0)
    add("--noautoanchor", action="store_true", help="skip the anchor check")
    add("--evolve", nargs="?", type=int, const=300, default=0, help="search hyper-parameters for N (300) generations")
    add("--allow-background", action="store_true", help="train although no training image has a box")
    add("--strict-data", action="store_true", help="stop when the scan drops an image, a row or a list entry")

    group = parser.add_argument_group("machine")
    add = group.add_argument
    add("--device", default="", help="cpu, 0, or 0,1; empty: the first GPU, else the CPU")
    add("--workers", type=int, default=8, help="loader processes, at most")
    add("--cache-images", nargs="?", const=True, default=False, choices=["ram", "disk"],
        help="keep the resized images in RAM (default), or in one file that is mapped into memory")  # fmt: skip
    add("--amp", choices=["fp16", "bf16", "off"], help="mixed precision; default fp16 on a GPU, off on a CPU")
    add("--sync-bn", action="store_true", help="batch statistics over all processes (with torchrun)")
    add("--local_rank", "--local-rank", type=int, default=-1, help="set by launchers")

    _add_heads_flags(parser)
    _add_fast_flags(parser)
    _add_run_length_flags(parser)

    group = parser.add_argument_group("what is written")
    add = group.add_argument
    add("--project", default="runs/train", help="folder of all runs")
    add("--name", default="exp", help="folder of this run; a number is appended if it exists")
    add("--exist-ok", action="store_true", help="write into the run folder even if it exists")
    add("--nosave", action="store_true", help="save only the last checkpoint")
    add("--save-period", "--save_period", type=int, default=-1, metavar="N", help="keep every Nth epoch's checkpoint")
    add("--notest", action="store_true", help="validate only after the last epoch")
    add("--test-batch-size", type=int, default=None, help="validation batch; default twice the training batch")
    add("--v5-metric", action="store_true", help="close the recall axis at 1.0 in AP")

    _add_idle_flags(parser)
    return parser


def layer_range(text):
    """The numbers of a single one, or of a range such as 29-76, both ends included."""
    first, dash, last = text.partition("-")
    if not first.isdigit() or (dash and not (last.isdigit() and int(first) < int(last))):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a layer number nor a range such as 29-76")
    return list(range(int(first), int(last or first) + 1))


class Flat(argparse.Action):
    """Stores one list of all the lists that the type makes."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, [value for part in values for value in part])


def _add_heads_flags(parser):
    add = parser.add_argument_group("one backbone, several heads (1B4H)").add_argument
    add("--heads", type=int, default=0, metavar="N", help="number of detection heads; needs --head-config and a --cfg")
    add("--head-config", default="", metavar="FILE", help="yaml that says which head learns which classes")
    add("--transfer-weights", action="store_true", help="of --weights only backbone and neck; heads and epochs anew")
    add("--auto-lr", action="store_true", help="lr0 by the square root of batch/64 above 64, longer warm-up from 128")


def _add_fast_flags(parser):
    add = parser.add_argument_group("faster paths (off by default)").add_argument
    add("--fast-dataloader", action="store_true", help="shortcut for --persistent-workers --worker-tensor")
    add("--persistent-workers", action="store_true", help="loader workers live across epochs (needs workers > 0)")
    add("--worker-tensor", action="store_true", help="workers assemble the batches; the main process copies nothing")
    add("--micro-batch-size", type=int, default=0, help="samples in a worker's share under --worker-tensor; 0: chosen")
    add("--prefetch-factor", type=int, default=None, help="batches (or micro-batches) that a worker prepares ahead")
    add("--loader-timeout", type=int, default=300, help="seconds without a batch after which these loaders give up")
    add("--seed", type=int, default=None, help="equal batches for any workers, flags, ranks and restarts; shuffles")
    add("--fast-loss", action="store_true", help="assignment and loss for the whole batch at once; equal values")
    add("--fast-step", action="store_true", help="a step that never waits for the GPU; channels-last, multi-tensor")
    add("--sync-interval", type=int, default=10, metavar="N", help="steps between two loss read-backs of --fast-step")
    add("--cuda-graph", action="store_true", help="the whole step as a CUDA graph (with --fast-loss and --fast-step)")
    add("--fast", action="store_true", help="every faster path that this machine can run; says which")
    add("--fast-val", action="store_true", help="validate whole batches on the device; pictures only in the end")
    add("--ota-last", type=int, default=None, metavar="N", help="OTA in the last N epochs only, the plain loss before")


def _add_run_length_flags(parser):
    add = parser.add_argument_group("shorter and staged runs (off by default)").add_argument
    add("--subset-size", type=int, default=0, metavar="N", help="train on N random images, every class if possible")
    add("--subset-seed", type=int, default=0, metavar="S", help="which N images; the same S draws the same ones")
    add("--overfit", action="store_true", help="train and validate on the first 10 (--subset-size) images as they are")
    add("--resize-schedule", default="", metavar="E:PX,...", help="training size by epoch: 0:320,20:480,40:640")
    add("--max-iter", type=int, default=0, metavar="N", help="end an epoch after N batches; the next one goes on there")
    add("--eval-interval", type=int, default=0, metavar="N", help="validate every N epochs, and after the last")
    add("--patience", type=int, default=0, metavar="N", help="stop after N epochs without a better one; 0: never")


def _add_idle_flags(parser):
    add = parser.add_argument_group("accepted for compatibility, without effect here").add_argument
    add("--bucket", default="", help="Google storage bucket")
    add("--entity", default=None, help="W&B entity")
    add("--upload_dataset", action="store_true", help="W&B: upload the data set")
    add("--bbox_interval", type=int, default=-1, help="W&B: interval of box pictures")
    add("--artifact_alias", default="latest", help="W&B: alias of the data set")


def test_parser():
    """The command line of test.py."""
    parser = argparse.ArgumentParser("test.py", description="Score a YOLOv7 detector on a data set.")
    add = parser.add_argument
    add("--weights", nargs="+", default=["yolov7.pt"], help="checkpoint; several form an ensemble")
    add("--data", default="data/coco.yaml", help="data set yaml")
    add("--batch-size", type=int, default=32)
    add("--img-size", type=int, default=640, help="pixels")
    add("--conf-thres", type=float, default=0.001, help="smallest confidence that counts")
    add("--iou-thres", type=float, default=0.65, help="IoU above which NMS removes a box")
    add("--task", default="val", choices=("train", "val", "test", "speed", "study"), help="split to score, or a series")
    add("--device", default="", help="cpu or 0")
    add("--single-cls", action="store_true", help="treat all classes as one")
    add("--augment", action="store_true", help="test-time augmentation")
    add("--strict-data", action="store_true", help="stop when the scan drops an image, a row or a list entry")
    add("--verbose", action="store_true", help="a row for each class")
    add("--save-txt", action="store_true", help="write the detections of each image to labels/*.txt")
    add("--save-hybrid", action="store_true", help="merge the labels into the detections (implies --save-txt)")
    add("--save-conf", action="store_true", help="add the confidence to --save-txt")
    add("--save-json", action="store_true", help="write a COCO json and score it officially")
    add("--save-per-class-ap", default=None, metavar="FILE", help="write the AP of every class to a json file")
    add("--project", default="runs/test", help="folder of all tests")
    add("--name", default="exp", help="folder of this test; a number is appended if it exists")
    add("--exist-ok", action="store_true", help="write into the folder even if it exists")
    add("--one-class-score", action="store_true", help="1B4H: heads with a single class give it the score 1")
    add("--no-trace", action="store_true", help="accepted for compatibility: nothing is traced here")
    add("--v5-metric", action="store_true", help="close the recall axis at 1.0 in AP")
    return parser


def explicit_options(parser, arguments=None):
    """Only what the user typed, as a dict: the same parser without its defaults."""
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return vars(parser.parse_known_args(arguments)[0])


def check_train_options(opt):
    """Raise ValueError for a value that no run could use; extend --img-size to (train, validation)."""
    if not opt.cfg and not opt.weights:
        raise ValueError("give --cfg (a model yaml) or --weights (a checkpoint): there is nothing to train")
    if opt.transfer_weights and not opt.weights:
        raise ValueError("--transfer-weights takes backbone and neck from --weights; give a checkpoint there")
    if opt.batch_size == 0:
        raise ValueError("--batch-size 0 is too small: it has to be at least 1, or -1 for what fits the GPU")
    if opt.batch_size == -1 and "," in opt.device:
        raise ValueError("--batch-size -1, what fits, is for one GPU a process; give a number, or start with torchrun")
    _check_shorter_run(opt)
    if len(opt.img_size) > 2 or min(opt.img_size) < 1:
        raise ValueError(f"--img-size {opt.img_size} has to be one or two positive numbers: training, validation")
    limits.check(vars(opt), limits.TRAIN_OPTIONS, limits.option_name)
    _check_run_name(opt)
    opt.img_size = [opt.img_size[0], opt.img_size[-1]]


def _check_shorter_run(opt):
    """Refuse what contradicts itself; with --resize-schedule its last size becomes --img-size."""
    if opt.patience and opt.notest:
        raise ValueError("--patience needs validations to look at; drop --notest, or use --eval-interval")
    drawn = [f"--{name.replace('_', '-')}" for name in ("image_weights", "multi_scale", "quad") if getattr(opt, name)]
    if opt.overfit and drawn:
        raise ValueError(f"--overfit trains the same images as they are, every epoch; drop {' '.join(drawn)}")
    if opt.overfit and opt.resize_schedule:
        raise ValueError("--overfit has one image size; drop --resize-schedule and give --img-size")
    if opt.resize_schedule:
        final = resize_schedule.parse(opt.resize_schedule).final
        if opt.img_size not in ([640, 640], [final], [final, final]):
            logger.warning(
                "--img-size %s: with --resize-schedule, validation has its last size, %d", opt.img_size, final
            )
        opt.img_size = [final, final]


def check_test_options(opt):
    """Raise ValueError for a value that no test could use."""
    limits.check(vars(opt), limits.TEST_OPTIONS, limits.option_name)
    _check_run_name(opt)


def _check_run_name(opt):
    """A name without letters would number the folder of all runs instead of one in it."""
    if Path(opt.project, opt.name.strip()) == Path(opt.project):
        raise ValueError(f"--name {shown(opt.name)} names no folder inside of --project; give a name, such as exp")


def round_up(size, stride):
    """The smallest multiple of `stride` that is not below `size` (pixels); a change is a warning."""
    rounded = -(-size // stride) * stride
    if rounded != size:
        logger.warning("--img-size %d has to be a multiple of the largest stride %d: %d is used", size, stride, rounded)
    return rounded


def warn_about_idle_options(opt):
    """One warning for flags that are understood and do nothing."""
    idle = {"bucket": "", "entity": None, "upload_dataset": False, "bbox_interval": -1,
            "artifact_alias": "latest"}  # fmt: skip
    used = [f"--{name}" for name, default in idle.items() if getattr(opt, name, default) != default]
    if used:
        logger.warning("%s: accepted, but W&B and Google storage are not supported here; nothing is sent", used)


def save_options(opt, path):
    """Write the options as opt.yaml: plain values, sorted as they were parsed."""
    values = {key: str(value) if isinstance(value, Path) else value for key, value in vars(opt).items()}
    with atomic_write(path, "w") as file:
        yaml.safe_dump(values, file, sort_keys=False)


def load_options(path):
    """Options of an earlier run from its opt.yaml; unknown keys are dropped with one warning, missing ones default.

    Raises ValueError when the file is missing, no mapping, or has text where a number belongs.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is missing: a run can only be resumed with the opt.yaml that it wrote")
    stored = read_yaml(path)
    parser = train_parser()
    opt = parser.parse_args([])
    if "total_batch_size" in stored:  # batch_size is the share of one of that run's processes
        stored["batch_size"] = stored["total_batch_size"]
    unknown = [key for key in stored if key not in vars(opt) and key not in RUNTIME_KEYS]
    if unknown:
        logger.warning("%s: options unknown here are ignored: %s", path, ", ".join(map(str, unknown)))
    for action in parser._actions:
        if action.dest in stored and action.dest in vars(opt):
            setattr(opt, action.dest, _checked(stored[action.dest], action, path))
    return opt


def _checked(value, action, path):
    """A value of an opt.yaml, after a look at its type."""
    numbers = value if isinstance(value, list) else [value]
    if action.type and value != action.default and not all(isinstance(number, (int, float)) for number in numbers):
        raise ValueError(f"{path}: {action.dest} has to be a number, not {shown(value)}")
    return value
