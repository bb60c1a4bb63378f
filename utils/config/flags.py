"""Every flag of train.py, test.py, detect.py and export.py, one row each.

The parsers, the checks, --resume, opt.yaml, the staged approval and docs/flags.md (tools/make_docs.py) all read these
rows. A new flag is a new row; the code that it is for finds its value in the options, under `dest`.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from utils.config.limits import SEED, SHARE, SHARE_BELOW_ONE, SIDE, Range, at_least
from utils.system.files import shown

# What --resume does with a flag that is typed again:
KEPT = "kept"  # the value of the run holds; the typed one is ignored, with a warning
STAYS = "stays"  # the typed value is taken, and written to opt.yaml for the next --resume
MACHINE = "machine"  # the typed value is taken this once: how this machine does it, speed and rounding, nothing else
START = "start"  # as MACHINE, but it only concerns this start, so that its change is not logged


class Flat(argparse.Action):
    """Stores one list of all the lists that the type makes."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, [value for part in values for value in part])


def layer_range(text):
    """The numbers of a single one, or of a range such as 29-76, both ends included."""
    first, dash, last = text.partition("-")
    if not first.isdigit() or (dash and not (last.isdigit() and int(first) < int(last))):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a layer number nor a range such as 29-76")
    return list(range(int(first), int(last or first) + 1))


@dataclass(frozen=True)
class Flag:
    """One flag; with names and help alone it is a switch that is off. Fields without a comment are those of argparse.

    A switch of the machine also has a --no-... form, which turns it off when a run that had it is resumed.
    """

    names: str  # all spellings; messages use the first one
    help: str | None = None
    default: object = False
    type: Callable | None = None  # text without one
    range: Range | None = None  # of the number, or of each of several
    resume: str = KEPT  # what --resume does with it, see above
    stage: int | None = None  # the approval stage of the opt-in path that the flag opens
    action: str | Callable | None = None
    choices: Sequence | None = None
    const: object = None
    metavar: str | None = None
    nargs: str | None = None
    group: str = ""  # title in --help

    @property
    def name(self) -> str:
        return self.names.split()[0]

    @property
    def dest(self) -> str:
        return self.name[2:].replace("-", "_")

    @property
    def is_reported(self) -> bool:
        """Whether --resume logs that the value is another one than the checkpoint's."""
        return self.resume in (STAYS, MACHINE)

    def check(self, value: object, where: str) -> None:
        """Raise ValueError, which begins with `where` (file and key), unless the command line could give this `value`.

        For values of files that a person can edit: of the right type, one of the choices, and within the range.
        """
        if value is None and self.default is None or self.nargs == "?" and (value is False or value is self.const):
            return
        if self.nargs == "+":
            if not isinstance(value, list) or not value:
                raise ValueError(f"{where} has to be a list such as {self.default}, not {shown(value)}")
        elif self.choices and value not in self.choices:
            choices = ", ".join(f"'{choice}'" for choice in self.choices)
            raise ValueError(f"{where} has to be one of {choices} (in quotes), not {shown(value)}")
        kind, wanted = self._kind()
        for item in value if self.nargs == "+" and isinstance(value, list) else [value]:
            if not isinstance(item, kind) or (isinstance(item, bool) and kind is not bool):
                whole = "whole " if isinstance(item, float) and kind is int else ""
                raise ValueError(f"{where} has to be {wanted.format(whole)}, not {shown(item)}")
            if self.range:
                self.range.check(where, item)

    def _kind(self):
        """The Python type of a value, or of each of several, and what a message calls it."""
        if self.type:
            return (int, float) if self.type is float else int, "a {}number"
        return (bool, "true or false") if self.default is False and not self.nargs else (str, "text, in quotes")

    def add_to(self, parser) -> None:
        """Add the flag to a parser, or to a group of one."""
        given = {name: getattr(self, name) for name in ("type", "action", "choices", "const", "metavar", "nargs")}
        options = {name: value for name, value in given.items() if value is not None}
        if self.default is False and not self.nargs:
            options["action"] = "store_true"
        parser.add_argument(*self.names.split(), default=self.default, help=self.help, **options)
        if self.default is False and self.resume == MACHINE:
            quiet = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            parser.add_argument(f"--no-{self.name[2:]}", dest=self.dest, action="store_false", **quiet)


def _table(rows: Sequence[Flag | str]) -> dict[str, Flag]:
    """{dest: Flag} of Flags, each behind the title of its group."""
    flags, group = {}, ""
    for row in rows:
        if isinstance(row, str):
            group = row
        else:
            flags[row.dest] = replace(row, group=group)
    return flags


IDLE = "accepted for compatibility, without effect here"
TRAIN_FLAGS = _table([
    "stock: what to train",
    Flag("--weights", "weights to start from (.pt); empty: from scratch", "", metavar="FILE"),
    Flag("--cfg", "model yaml, e.g. cfg/training/yolov7-tiny.yaml; empty: the one in --weights", "", metavar="FILE"),
    Flag("--data", "data set yaml", "data/coco.yaml", metavar="FILE"),
    Flag("--hyp", "hyper-parameter yaml", "data/hyp.scratch.p5.yaml", metavar="FILE"),
    Flag("--epochs", "passes over the data; they are counted from 0", 300, int, at_least(1), STAYS, metavar="EPOCHS"),
    Flag("--batch-size", "images per step, over all GPUs; -1: what fits", 16, int, at_least(-1), STAYS,
         metavar="IMAGES"),
    Flag("--img-size", "training and validation size", [640, 640], int, SIDE, nargs="+", metavar="PIXELS"),
    Flag("--single-cls", "treat all classes as one"),
    Flag("--freeze", "N: the first N layers; several numbers or a range such as 29-76: those layers", [0],
         layer_range, at_least(0), nargs="+", action=Flat, metavar="LAYERS"),
    Flag("--resume", "continue the newest run, or the given last.pt", resume=START, nargs="?", const=True,
         metavar="FILE"),
    "stock: how to train",
    Flag("--rect", "rectangular training batches (no mosaic)"),
    Flag("--multi-scale", "vary the image size by +-50%% from batch to batch"),
    Flag("--image-weights", "draw images by the classes that score worst"),
    Flag("--quad", "collate four images into one of double size"),
    Flag("--adam", "Adam instead of SGD"),
    Flag("--linear-lr", "linear learning rate schedule instead of cosine"),
    Flag("--label-smoothing", "share of certainty that class labels give up", 0.0, float, SHARE_BELOW_ONE,
         metavar="SHARE"),
    Flag("--noautoanchor", "skip the anchor check"),
    Flag("--evolve", "search hyper-parameters; 300 without a number", 0, int, at_least(0), nargs="?", const=300,
         metavar="GENERATIONS"),
    "stock: machine",
    Flag("--device", "cpu, 0, or 0,1; empty: the first GPU, else the CPU", "", resume=MACHINE, metavar="NAME"),
    Flag("--workers", "loader processes, at most", 8, int, at_least(0), MACHINE, metavar="PROCESSES"),
    Flag("--cache-images", "keep the resized images in RAM (default), in one file that is mapped into memory, or where "
         "the GPU reads them (needs --fast)", resume=MACHINE, nargs="?", const=True, choices=["ram", "disk", "gpu"]),
    Flag("--sync-bn", "batch statistics over all processes (with torchrun)"),
    Flag("--local_rank --local-rank", "set by launchers", -1, int, resume=START, metavar="RANK"),
    "stock: what is written",
    Flag("--project", "folder of all runs", "runs/train", metavar="FOLDER"),
    Flag("--name", "folder of this run; a number is appended if it exists", "exp", metavar="NAME"),
    Flag("--exist-ok", "write into the run folder even if it exists"),
    Flag("--nosave", "save only the last checkpoint"),
    Flag("--save-period --save_period", "keep the checkpoint of every Nth epoch; -1: of none", -1, int, at_least(-1),
         STAYS, metavar="EPOCHS"),
    Flag("--notest", "validate only after the last epoch"),
    Flag("--v5-metric", "close the recall axis at 1.0 in AP"),
    Flag("--verbose", "print the table of layers, and which files are written", resume=START),
    "speed (off by default; --no-fast and the like turn one off on --resume)",
    Flag("--fast", "every faster path that this machine can run; says which", resume=MACHINE, stage=6),
    Flag("--fast-dataloader", "shortcut for --persistent-workers --worker-tensor", resume=MACHINE, stage=2),
    Flag("--persistent-workers", "loader workers live across epochs (needs workers > 0)", resume=MACHINE, stage=2),
    Flag("--worker-tensor", "workers assemble the batches; the main process copies nothing", resume=MACHINE, stage=3),
    Flag("--micro-batch-size", "what a worker assembles at a time under --worker-tensor; 0: chosen", 0, int,
         at_least(0), MACHINE, stage=4, metavar="IMAGES"),
    Flag("--prefetch-factor", "batches (or micro-batches) that a worker prepares ahead; default: torch's", None, int,
         at_least(1), MACHINE, stage=2, metavar="BATCHES"),
    Flag("--loader-timeout", "a run gives up after this long without a batch, or another process", 300, int,
         at_least(1), MACHINE, metavar="SECONDS"),
    Flag("--seed", "equal batches for any workers, flags, ranks and restarts; shuffles; default: stock's order", None,
         int, SEED, stage=2, metavar="NUMBER"),
    Flag("--fast-loss", "assignment and loss for the whole batch at once; equal values", resume=MACHINE, stage=6),
    Flag("--fast-step", "a step that never waits for the GPU; channels-last, multi-tensor", resume=MACHINE, stage=6),
    Flag("--sync-interval", "between two loss read-backs of --fast-step", 10, int, at_least(1), MACHINE,
         metavar="STEPS"),
    Flag("--cuda-graph", "the whole step as a CUDA graph (with --fast-loss and --fast-step)", resume=MACHINE, stage=6),
    Flag("--fast-val", "validate whole batches on the device; images only in the end", resume=MACHINE, stage=6),
    Flag("--amp", "mixed precision; default: fp16 on a GPU, off on a CPU", None, resume=MACHINE,
         choices=["fp16", "bf16", "off"]),
    Flag("--test-batch-size", "validation batch; default: twice the training batch", None, int, at_least(1), STAYS,
         metavar="IMAGES"),
    "data",
    Flag("--allow-background", "train although no training image has a box"),
    Flag("--strict-data", "stop when the scan drops an image, a row or a list entry", resume=START),
    Flag("--subset-size", "train on so many random ones, every class if possible; 0: all", 0, int, at_least(0),
         metavar="IMAGES"),
    Flag("--subset-seed", "which images; the same number draws the same ones", 0, int, SEED, metavar="NUMBER"),
    Flag("--overfit", "train and validate on the first 10 (--subset-size) images as they are"),
    "staged runs (off by default)",
    Flag("--resize-schedule", "training size by epoch, in pixels: 0:320,20:480,40:640", "", metavar="E:PX,..."),
    Flag("--ota-last", "OTA in the last N epochs only, the plain loss before; default: OTA in all", None, int,
         at_least(1), stage=6, metavar="EPOCHS"),
    Flag("--max-iter", "end an epoch after N batches, the next one goes on there; 0: with the data", 0, int,
         at_least(0), metavar="BATCHES"),
    Flag("--eval-interval", "validate every N epochs, and after the last; 0: after each", 0, int, at_least(0), STAYS,
         metavar="EPOCHS"),
    Flag("--patience", "stop after N epochs without a better one; 0: never", 0, int, at_least(0), STAYS,
         metavar="EPOCHS"),
    "heads (1B4H: one backbone, several heads)",
    Flag("--heads", "number of detection heads, with --head-config and a --cfg; 0: as the model says", 0, int,
         at_least(0), metavar="HEADS"),
    Flag("--head-config", "yaml that says which head learns which classes", "", metavar="FILE"),
    Flag("--transfer-weights", "of --weights only backbone and neck; heads and epochs anew"),
    Flag("--auto-lr", "lr0 by the square root of batch/64 above 64, longer warm-up from 128"),
    IDLE,
    Flag("--bucket", "Google storage bucket", "", metavar="NAME"),
    Flag("--entity", "W&B entity", None, metavar="NAME"),
    Flag("--upload_dataset", "W&B: upload the data set"),
    Flag("--bbox_interval", "W&B: interval of box images", -1, int, metavar="EPOCHS"),
    Flag("--artifact_alias", "W&B: alias of the data set", "latest", metavar="NAME"),
])  # fmt: skip
TEST_FLAGS = _table([
    "what to score",
    Flag("--weights", "checkpoint; several form an ensemble", ["yolov7.pt"], nargs="+", metavar="FILE"),
    Flag("--data", "data set yaml", "data/coco.yaml", metavar="FILE"),
    Flag("--task", "split to score, or a series", "val", choices=("train", "val", "test", "speed", "study")),
    Flag("--single-cls", "treat all classes as one"),
    Flag("--strict-data", "stop when the scan drops an image, a row or a list entry"),
    "how to score",
    Flag("--batch-size", "images that go through the network at once", 32, int, at_least(1), metavar="IMAGES"),
    Flag("--img-size", "long side of the images", 640, int, SIDE, metavar="PIXELS"),
    Flag("--conf-thres", "smallest confidence that counts, 0 to 1", 0.001, float, SHARE, metavar="CONFIDENCE"),
    Flag("--iou-thres", "NMS removes a box above it, 0 to 1", 0.65, float, SHARE, metavar="IOU"),
    Flag("--augment", "test-time augmentation"),
    Flag("--v5-metric", "close the recall axis at 1.0 in AP"),
    Flag("--one-class-score", "1B4H: heads with a single class give it the score 1"),
    Flag("--device", "cpu or 0; empty: the first GPU, else the CPU", "", metavar="NAME"),
    "what is written",
    Flag("--verbose", "a row for each class, also of 50 classes or more"),
    Flag("--save-txt", "write the detections of each image to labels/*.txt"),
    Flag("--save-hybrid", "merge the labels into the detections (implies --save-txt)"),
    Flag("--save-conf", "add the confidence to --save-txt"),
    Flag("--save-json", "write a COCO json and score it officially"),
    Flag("--save-per-class-ap", "write the AP of every class to a json file", None, metavar="FILE"),
    Flag("--project", "folder of all tests", "runs/test", metavar="FOLDER"),
    Flag("--name", "folder of this test; a number is appended if it exists", "exp", metavar="NAME"),
    Flag("--exist-ok", "write into the folder even if it exists"),
    IDLE,
    Flag("--no-trace", "nothing is traced here"),
])  # fmt: skip
EXPORT_FLAGS = _table([
    "what to write",
    Flag("--weights", "checkpoint", "yolov7.pt", metavar="FILE"),
    Flag("--include", "files to write", ["torchscript", "onnx"], nargs="+", choices=("torchscript", "onnx")),
    Flag("--img-size", "height and width, or the side of a square", [640, 640], int, SIDE, nargs="+",
         metavar="PIXELS"),
    Flag("--batch-size", "images that the file takes at once", 1, int, at_least(1), metavar="IMAGES"),
    Flag("--device", "cpu or 0", "cpu", metavar="NAME"),
    "what the files compute",
    Flag("--grid", "decoded boxes instead of raw maps"),
    Flag("--end2end", "decoded boxes and NMS in ONNX: for ONNX Runtime with --max-wh, else for TensorRT"),
    Flag("--max-wh", "between classes in NMS, not less than the image; 0: agnostic; default: for TensorRT", None, int,
         at_least(0), metavar="PIXELS"),
    Flag("--topk-all", "of an image, at most", 100, int, at_least(1), metavar="DETECTIONS"),
    Flag("--iou-thres", "NMS removes a box above it, 0 to 1", 0.45, float, SHARE, metavar="IOU"),
    Flag("--conf-thres", "smallest confidence that counts, 0 to 1", 0.25, float, SHARE, metavar="CONFIDENCE"),
    Flag("--include-nms", "the same as --end2end for TensorRT"),
    "how ONNX is written",
    Flag("--dynamic", "batch, height and width may vary"),
    Flag("--dynamic-batch", "the batch may vary"),
    Flag("--exporter", "torch's tracing exporter, or its newer one", "legacy", choices=("legacy", "dynamo")),
    Flag("--opset", "default: 12, and 18 for --exporter dynamo", None, int, Range(11, 25), metavar="VERSION"),
    Flag("--simplify", "shorten the graph with onnxslim"),
    "how the files are checked",
    Flag("--source", "image, folder or pattern to compare on; empty: a drawn image", "", metavar="PATH"),
    Flag("--data", "data set yaml whose first val images are compared on", "", metavar="FILE"),
    IDLE,
    Flag("--fp16", "CoreML only"),
    Flag("--int8", "CoreML only"),
])  # fmt: skip
DETECT_FLAGS = _table([
    "what to detect",
    Flag("--weights", "checkpoint; several form an ensemble", ["yolov7.pt"], nargs="+", metavar="FILE"),
    Flag("--source", "images, videos, folders, globs, a camera number, stream addresses, or a .txt with one of those "
         "a line", ["inference/images"], nargs="+", metavar="SOURCE"),
    Flag("--img-size", "long side of the network's input", 640, int, SIDE, metavar="PIXELS"),
    Flag("--conf-thres", "smallest confidence that counts, 0 to 1", 0.25, float, SHARE, metavar="CONFIDENCE"),
    Flag("--iou-thres", "NMS removes a box above it, 0 to 1", 0.45, float, SHARE, metavar="IOU"),
    Flag("--classes", "only these; default: all", None, int, at_least(0), nargs="+", metavar="ID"),
    Flag("--agnostic-nms", "boxes of different classes suppress each other"),
    Flag("--augment", "test-time augmentation"),
    "machine",
    Flag("--device", "cpu or 0; empty: the first GPU, else the CPU", "", metavar="NAME"),
    Flag("--batch-size", "images that go through the network at once; for a GPU", 1, int, at_least(1),
         metavar="IMAGES"),
    Flag("--half", "half precision; default: on a GPU, where it works", None, action=argparse.BooleanOptionalAction),
    "what is written",
    Flag("--nosave", "draw no images and videos"),
    Flag("--view-img", "show every image in a window; q ends"),
    Flag("--save-txt", "write the detections of each image or frame to labels/*.txt"),
    Flag("--save-conf", "add the confidence to --save-txt"),
    Flag("--save-csv", "write all detections to detections.csv"),
    Flag("--save-json", "write all detections to detections.json, in COCO's result format"),
    Flag("--save-crop", "write every detected object to crops/<class>"),
    Flag("--show-counts", "draw the number of objects of each class"),
    Flag("--hide-labels", "draw boxes without names"),
    Flag("--hide-conf", "draw names without confidences"),
    Flag("--line-thickness", "of the boxes; 0: by the size of the image", 0, int, Range(0, 100), metavar="PIXELS"),
    Flag("--project", "folder of all detections", "runs/detect", metavar="FOLDER"),
    Flag("--name", "folder of this one; a number is appended if it exists", "exp", metavar="NAME"),
    Flag("--exist-ok", "write into the folder even if it exists"),
    IDLE,
    Flag("--update", "stock: strip the checkpoint"),
    Flag("--no-trace", "nothing is traced here"),
])  # fmt: skip
# Flags of the 1B4H fork that train.py has not, and what to do instead: see docs/differences-from-stock.md.
_BY_HEAD = "is not carried over: of its augmentation by head only degrees and shear ever acted; put them into --hyp"
_A_FILE = "is a file here: --head-config data/coco_320_1b4h_{}.yaml, or one of tools/group_classes.py"
FORK_FLAGS = {
    "--class-aware-aug": _BY_HEAD,
    "--head-params": _BY_HEAD,
    "--standard-grouping": _A_FILE.format("standard"),
    "--geometry-grouping": _A_FILE.format("geometry"),
    "--head-attention": "is a model here: --cfg cfg/training/yolov7-tiny-1b4h-attn.yaml",
    "--rl-augment": "is a tool here: tools/run_trials.py --sampler tpe searches hyper-parameters",
}
