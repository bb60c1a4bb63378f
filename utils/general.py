"""Names that scripts written for stock YOLOv7 import from here. Nothing in this project does."""

from utils.config.options import check_img_size
from utils.ops.boxes import box_iou, clip_coords, scale_coords, xywh2xyxy, xyxy2xywh
from utils.ops.nms import non_max_suppression
from utils.run.entry import set_logging
from utils.system.files import check_file, increment_path

__all__ = [
    "box_iou", "check_file", "check_img_size", "clip_coords", "increment_path", "non_max_suppression", "scale_coords",
    "set_logging", "xywh2xyxy", "xyxy2xywh",
]  # fmt: skip
