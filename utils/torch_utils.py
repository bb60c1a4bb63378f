"""Names that scripts written for stock YOLOv7 import from here. Nothing in this project does."""

from utils.engine.checkpoint_reader import intersect_dicts
from utils.engine.ema import ModelEMA
from utils.system.distributed import select_device, time_synchronized

__all__ = ["ModelEMA", "intersect_dicts", "select_device", "time_synchronized"]
