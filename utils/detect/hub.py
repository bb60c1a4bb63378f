"""A model for other people's scripts: takes images of any kind, gives results with names."""

import http.client
import time
import urllib.request
from pathlib import Path

import cv2
import numpy as np
import torch
from PIL import Image
from torch import nn

from utils.data.images.reading import pillow_pixels, read_image, to_8bit
from utils.data.transforms import letterbox
from utils.detect.predict import Thresholds, suppress, to_original
from utils.detect.results import HubResults
from utils.system.files import cause_of, counted, printable, shown

FETCH_SECONDS = 10


class AutoShape(nn.Module):
    """`model` with everything around it: reading, letterbox, NMS, and boxes in pixels of the images.

    Attributes that may be set: conf (.25), iou (.45), classes (ids, or None for all), agnostic (False).
    """

    conf, iou, classes, agnostic = 0.25, 0.45, None, False

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model.eval()
        self.names, self.stride, self.yaml = model.names, model.stride, getattr(model, "yaml", None)

    @torch.inference_mode()
    def forward(self, imgs, size: int = 640, augment: bool = False, profile: bool = False):
        """`HubResults` of an image or a list of images; long side `size` pixels in the network.

        An image is a path, an http address, a Pillow image, or an array [h x w x 3 or 1, 3 x h x w, or h x w, RGB].
        A tensor [b x 3 x h x w, RGB, 0..1] gives the raw output of the model instead. Raises ValueError for what cannot
        be read. `profile` logs the time of every layer.
        """
        weight = next(self.model.parameters())
        if isinstance(imgs, torch.Tensor):
            if imgs.ndim != 4:
                raise ValueError(
                    f"a tensor has to be [b x 3 x h x w], not {list(imgs.shape)}; give one image as an array"
                )
            return self.model(imgs.to(weight.device, weight.dtype), augment=augment, profile=profile)
        if not isinstance(size, (int, np.integer)) or size < 1:
            raise ValueError(f"size {shown(size)} has to be a whole number of pixels, such as 640")
        self._check_attributes()
        clock = [time.perf_counter()]
        given = list(imgs) if isinstance(imgs, (list, tuple)) else [imgs]
        if not given:
            raise ValueError("there is no image to detect in")
        images, files = zip(*(load(image, number) for number, image in enumerate(given)), strict=True)
        pixels = self._letterbox(images, size)
        batch = torch.from_numpy(pixels).to(weight.device).to(weight.dtype) / 255
        clock.append(time.perf_counter())
        options = {"augment": augment} | ({"profile": True} if profile else {})  # an ensemble has no profile
        predictions = self.model(batch, **options)[0]
        clock.append(time.perf_counter())
        thresholds = Thresholds(self.conf, self.iou, self.classes, self.agnostic)
        found = suppress(predictions, thresholds)
        found = [to_original(rows, pixels.shape[2:], image.shape) for rows, image in zip(found, images, strict=True)]
        clock.append(time.perf_counter())
        times = [1e3 * (end - start) / len(images) for start, end in zip(clock, clock[1:], strict=False)]
        return HubResults(images, found, files, times, self.names, pixels.shape)

    def _check_attributes(self):
        """Raise ValueError for what a script has set that cannot be, and for a model of other images."""
        for name in ("conf", "iou"):
            value = getattr(self, name)
            if not isinstance(value, (int, float, np.number)) or not 0 <= value <= 1:
                raise ValueError(f"{name} {shown(value)} has to be between 0 and 1")
        wanted = () if self.classes is None else np.atleast_1d(np.asarray(self.classes)).tolist()
        for class_id in wanted:
            if class_id not in range(len(self.names)):
                raise ValueError(
                    f"classes has {shown(class_id)}, and the detector knows the ids 0 to {len(self.names) - 1}"
                )
        channels = (self.yaml or {}).get("ch", 3)
        if channels != 3:
            number = counted(channels, "channel")
            raise ValueError(f"the model takes images of {number}, which only a tensor can hold; give one")

    def _letterbox(self, images, size):
        """All images in the smallest common shape, by the stride, in which each has the long side `size`."""
        stride = int(self.stride.max())
        shapes = np.array([image.shape[:2] for image in images])
        scaled = (shapes * (size / shapes.max(1, keepdims=True))).max(0)
        shape = tuple(int(-(-side // stride) * stride) for side in scaled.round(6))
        boxed = [letterbox(image, shape, auto=False)[0] for image in images]
        return np.ascontiguousarray(np.stack(boxed).transpose(0, 3, 1, 2))


def load(image, number: int = 0) -> tuple[np.ndarray, str]:
    """(the image [h x w x 3, uint8, RGB], a file name for its results) of anything that `AutoShape` takes."""
    file = f"image{number}"
    if isinstance(image, (str, Path)):
        if not str(image):
            raise ValueError(f"the path of image {number} is empty")
        file = Path(str(image)).stem or file
        if str(image).lower().startswith(("http://", "https://")):
            image = fetch(str(image))
        else:
            image = read_image(image)[..., ::-1]
    elif isinstance(image, Image.Image):
        file = Path(getattr(image, "filename", "") or file).stem
        try:
            image = pillow_pixels(image)[..., ::-1]
        except Exception as error:  # a lazy image is read here; Pillow has nearly every exception class there is
            raise ValueError(f"image {number} ({printable(file)}) cannot be read ({cause_of(error)})") from error
    elif not isinstance(image, np.ndarray):
        raise ValueError(f"image {number} is a {type(image).__name__}; give paths, Pillow images or NumPy arrays")
    return np.ascontiguousarray(_as_rgb(image, number)), f"{file}.jpg"


def _as_rgb(image, number):
    if image.dtype.kind not in "buif":
        raise ValueError(f"image {number} is an array of {image.dtype}; numbers are wanted, such as uint8")
    if image.ndim == 3 and image.shape[0] < 5:  # [channels x h x w]
        image = image.transpose(1, 2, 0)
    if image.ndim == 2 or image.ndim == 3 and image.shape[2] == 1:
        image = np.repeat(image.reshape(*image.shape[:2], 1), 3, axis=2)
    if image.ndim != 3 or image.shape[2] not in (3, 4) or not image.size:
        raise ValueError(f"image {number} has the shape {list(image.shape)}; [height x width x 3] is wanted")
    image = image[..., :3]
    return np.where(image, np.uint8(255), np.uint8(0)) if image.dtype == bool else to_8bit(image)


def fetch(address: str) -> np.ndarray:
    """The image [h x w x 3, uint8, RGB] behind an http address."""
    try:
        with urllib.request.urlopen(address, timeout=FETCH_SECONDS) as answer:
            data = np.frombuffer(answer.read(), np.uint8)
        image = cv2.imdecode(data, cv2.IMREAD_COLOR)
    except (OSError, http.client.HTTPException, ValueError, cv2.error) as error:
        raise ValueError(f"{address} cannot be fetched ({error}); save the image and give its path") from error
    if image is None:
        raise ValueError(f"{address} is no image; give the address of a jpg or png")
    return image[..., ::-1]
