"""From a command line to checked options, and the way of options into and out of opt.yaml."""

import argparse
import logging
import textwrap
from pathlib import Path

import yaml

from utils.config import resize_schedule
from utils.config.data_yaml import read_yaml
from utils.config.flags import DETECT_FLAGS, EXPORT_FLAGS, FORK_FLAGS, IDLE, TEST_FLAGS, TRAIN_FLAGS, Flag
from utils.system.files import atomic_write, shown

logger = logging.getLogger(__name__)

# Written to opt.yaml, but facts about one start of a run and no flags. What is relative in the options, in the data
# yaml and in lists of images, counts from working_dir.
RUNTIME_KEYS = {"save_dir", "total_batch_size", "world_size", "global_rank", "working_dir"}


def train_parser() -> argparse.ArgumentParser:
    """The command line of train.py."""
    return _parser("train.py", "Train a YOLOv7 detector.", "--data YAML --cfg YAML", TRAIN_FLAGS, RATES, FORK_FLAGS)


def test_parser() -> argparse.ArgumentParser:
    """The command line of test.py."""
    return _parser("test.py", "Score a YOLOv7 detector on a data set.", "--weights FILE --data YAML", TEST_FLAGS)


def export_parser() -> argparse.ArgumentParser:
    """The command line of export.py."""
    about = "Write a YOLOv7 detector as files for other runtimes."
    return _parser("export.py", about, "--weights FILE", EXPORT_FLAGS)


def detect_parser() -> argparse.ArgumentParser:
    """The command line of detect.py."""
    about = "Detect objects in images, videos and streams."
    return _parser("detect.py", about, "--weights FILE --source PATH", DETECT_FLAGS)


RATES = "Rates (img/s) that a training prints count its steps only: not validation, compilation and files."
DEFAULTS = "In brackets: the default; switches are off."


class _Help(argparse.HelpFormatter):
    """Each value has its default in brackets behind it, unless the text says it."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=32)

    def _split_lines(self, text, width):
        """A flag in the text stays in one piece."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _get_help_string(self, action):
        default = action.default
        if default in (None, "", argparse.SUPPRESS) or default is False or "default:" in action.help:
            return action.help
        return f"{action.help} [{' '.join(map(str, default)) if isinstance(default, list) else default}]"


class _Parser(argparse.ArgumentParser):
    """Says of a flag in `elsewhere` {flag: sentence} what to do instead of it."""

    elsewhere: dict[str, str] = {}

    def parse_args(self, args=None, namespace=None):
        found, unknown = self.parse_known_args(args, namespace)
        for word in unknown:
            flag = word.partition("=")[0]
            if flag in self.elsewhere:
                self.error(f"{flag} {self.elsewhere[flag]}")
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found


def _parser(name, description, example, flags, epilog=None, elsewhere=None):
    parser = _Parser(
        name, f"python {name} {example} [flags]", f"{description} {DEFAULTS}", epilog, formatter_class=_Help
    )
    parser.elsewhere = elsewhere or {}
    groups = {"": parser}
    for flag in flags.values():
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        flag.add_to(groups[flag.group])
    return parser


def explicit_options(
    parser: argparse.ArgumentParser, arguments: list[str] | None = None, found: argparse.Namespace | None = None
) -> dict:
    """Only what the user typed, as a dict: the same parser without its defaults. `found` takes the values up."""
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return vars(parser.parse_known_args(arguments, found)[0])


def check_train_options(opt: argparse.Namespace) -> None:
    """Raise ValueError for a value that no run could use; extend --img-size to (train, validation)."""
    check_model(opt)
    if opt.transfer_weights and not opt.weights:
        raise ValueError("--transfer-weights takes backbone and neck from --weights; give a checkpoint there")
    check_values(opt)


def check_model(opt: argparse.Namespace) -> None:
    """Raise ValueError when the options name no model."""
    if not opt.cfg and not opt.weights:
        raise ValueError("give --cfg (a model yaml) or --weights (a checkpoint): there is nothing to train")


def check_values(opt: argparse.Namespace) -> None:
    """As `check_train_options`, but what there is to train may still be open."""
    if opt.batch_size == 0:
        raise ValueError("--batch-size 0 is too small: it has to be at least 1, or -1 for what fits the GPU")
    if opt.batch_size == -1 and "," in opt.device:
        raise ValueError("--batch-size -1, what fits, is for one GPU a process; give a number, or start with torchrun")
    _check_image_cache(opt)
    _check_shorter_run(opt)
    if len(opt.img_size) > 2 or min(opt.img_size) < 1:
        raise ValueError(f"--img-size {opt.img_size} has to be one or two positive numbers: training, validation")
    check_ranges(opt, TRAIN_FLAGS)
    _check_run_name(opt)
    opt.img_size = [opt.img_size[0], opt.img_size[-1]]


def _check_image_cache(opt):
    """Only workers that leave the pixels to the GPU, and steps that make them there, can use images on the card."""
    has_workers, has_steps = opt.worker_tensor or opt.fast_dataloader, opt.fast_step or opt.cuda_graph
    if opt.cache_images == "gpu" and not (opt.fast or (has_workers and has_steps)):
        raise ValueError("--cache-images gpu needs --worker-tensor and --fast-step; give both, or --fast")


def _check_shorter_run(opt):
    """Refuse what contradicts itself; with --resize-schedule its last size becomes --img-size."""
    if opt.patience and opt.notest:
        raise ValueError("--patience needs validations to look at; drop --notest, or use --eval-interval")
    drawn = [f"--{name.replace('_', '-')}" for name in ("image_weights", "multi_scale", "quad") if getattr(opt, name)]
    if opt.overfit and drawn:
        raise ValueError(f"--overfit trains the same images as they are, every epoch; drop {' '.join(drawn)}")
    if opt.subset_seed and not opt.subset_size:
        logger.warning("--subset-seed %d has no effect without --subset-size", opt.subset_seed)
    if opt.overfit and opt.resize_schedule:
        raise ValueError("--overfit has one image size; drop --resize-schedule and give --img-size")
    if opt.resize_schedule:
        schedule = resize_schedule.parse(opt.resize_schedule)
        _check_schedule_ends(schedule, opt)
        final = schedule.final
        if opt.img_size not in ([640, 640], [final], [final, final]):
            logger.warning(
                "--img-size %s: with --resize-schedule, validation has its last size, %d",
                " ".join(map(str, opt.img_size)),
                final,
            )
        opt.img_size = [final, final]


def _check_schedule_ends(schedule, opt):
    """A last size that is never trained would be validated all the same; a run that is resumed may be cut short."""
    start, size = schedule.stages[-1]
    if start >= opt.epochs:
        fault = (
            f"--resize-schedule {shown(opt.resize_schedule)}: {start}:{size} is never reached in {opt.epochs} epochs"
        )
        if not opt.resume:
            raise ValueError(f"{fault}; drop it, or give more --epochs")
        logger.warning("%s", fault)


def check_export_options(opt: argparse.Namespace) -> None:
    """Raise ValueError for what no export could do; complete --img-size, --opset and what a flag implies."""
    check_ranges(opt, EXPORT_FLAGS)
    if len(opt.img_size) > 2:
        raise ValueError(f"--img-size {opt.img_size} has to be one or two numbers: height, width")
    opt.img_size = [opt.img_size[0], opt.img_size[-1]]
    oldest = 18 if opt.exporter == "dynamo" else 12  # of the new exporter; what the readers of YOLOv7's files know
    if opt.exporter == "dynamo" and opt.opset and opt.opset < oldest:
        raise ValueError(f"--opset {opt.opset}: --exporter dynamo writes {oldest} or newer; leave it out for less")
    opt.opset = opt.opset or oldest
    if opt.source and opt.data:
        raise ValueError("--source and --data both say which images to compare on; give one of them")
    if opt.max_wh is not None and (opt.include_nms or not opt.end2end):
        raise ValueError("--max-wh is for ONNX Runtime: it needs --end2end, and is not for --include-nms")
    if opt.max_wh and opt.max_wh < max(opt.img_size):
        logger.warning(
            "--max-wh %d is less than the image: neighbours of different classes can suppress each other", opt.max_wh
        )
    opt.end2end = opt.end2end or opt.include_nms
    if opt.fp16 or opt.int8:
        logger.warning("--fp16 and --int8 are for CoreML, which is not written here; the files are float32")


def check_run_options(opt: argparse.Namespace, flags: dict[str, Flag]) -> None:
    """Raise ValueError for a value that no test (TEST_FLAGS) or detection (DETECT_FLAGS) could use."""
    check_ranges(opt, flags)
    _check_run_name(opt)


def check_ranges(opt: argparse.Namespace, flags: dict[str, Flag]) -> None:
    """Raise ValueError for a number that is out of the range of its row."""
    for name, flag in flags.items():
        if flag.range:
            flag.range.check(flag.name, getattr(opt, name, None))


def _check_run_name(opt):
    """A name without letters would number the folder of all runs instead of one in it."""
    if Path(opt.project, opt.name.strip()) == Path(opt.project):
        raise ValueError(f"--name {shown(opt.name)} names no folder inside of --project; give a name, such as exp")


def check_img_size(img_size: int, s: int = 32) -> int:
    """The smallest multiple of the stride `s` that is not below `img_size` (pixels); a change is a warning."""
    rounded = -(-img_size // s) * s
    if rounded != img_size:
        logger.warning("--img-size %d has to be a multiple of the largest stride %d: %d is used", img_size, s, rounded)
    return rounded


def warn_about_idle_options(opt: argparse.Namespace) -> None:
    """One warning for flags that are understood and do nothing."""
    idle = [flag for flag in TRAIN_FLAGS.values() if flag.group == IDLE]
    used = [flag.name for flag in idle if getattr(opt, flag.dest, flag.default) != flag.default]
    if used:
        logger.warning("%s: accepted, but W&B and Google storage are not supported here; nothing is sent", used)


def save_options(opt: argparse.Namespace, path: str | Path) -> None:
    """Write the options as opt.yaml, sorted as they were parsed."""
    with atomic_write(path, "w") as file:
        yaml.safe_dump(plain_values(opt), file, sort_keys=False)


def plain_values(opt: argparse.Namespace) -> dict:
    """The options as opt.yaml and checkpoints hold them: paths as text."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in vars(opt).items()}


def read_options(path: str | Path) -> tuple[argparse.Namespace, dict]:
    """(options, the RUNTIME_KEYS) of an earlier run from its opt.yaml.

    Unknown keys are dropped with one warning, missing ones default. Raises ValueError when the file is missing, no
    mapping, or has a value that the command line would not take.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is missing: a run can only be resumed with the opt.yaml that it wrote")
    stored = read_yaml(path)
    unknown = [key for key in stored if key not in TRAIN_FLAGS and key not in RUNTIME_KEYS]
    if unknown:
        logger.warning("%s: options unknown here are ignored: %s", path, ", ".join(map(str, unknown)))
    runtime = {key: stored[key] for key in stored if key in RUNTIME_KEYS}
    for key in ("save_dir", "working_dir"):
        if not isinstance(runtime.get(key, ""), str):
            raise ValueError(f"{path}: {key} has to be a folder, in quotes, not {shown(runtime[key])}")
    if not Path(runtime.get("working_dir", "/")).is_absolute():
        raise ValueError(f"{path}: working_dir {shown(runtime['working_dir'])} has to be an absolute path")
    options = {name: stored.get(name, flag.default) for name, flag in TRAIN_FLAGS.items()}
    for name, flag in TRAIN_FLAGS.items():
        flag.check(options[name], f"{path}: {name}")
    if "total_batch_size" in runtime:  # batch_size is the share of one of that run's processes
        options["batch_size"] = runtime["total_batch_size"]
        TRAIN_FLAGS["batch_size"].check(options["batch_size"], f"{path}: total_batch_size")
        if options["batch_size"] == 0:
            raise ValueError(f"{path}: total_batch_size 0 is too small: it has to be at least 1")
        share, processes, total = stored.get("batch_size"), runtime.get("world_size"), options["batch_size"]
        fitting = [-1, share * processes] if isinstance(share, int) and isinstance(processes, int) else [total]
        if "working_dir" not in runtime:  # stock's WORLD_SIZE may be that of a cluster, or of the run that was resumed
            fitting.append(share)
        if total not in fitting:
            raise ValueError(f"{path}: batch_size {share} for each of {processes} (world_size) is not total_batch_size "
                             f"{total}, which counts; correct them")  # fmt: skip
    return argparse.Namespace(**options), runtime
