"""Streams on the loopback address: several at a time, lost and found, in their own time."""

import logging
import time

import numpy as np
import pytest
import torch

from tests.detect_cases import camera, file_server, frames_of, picture, write_film
from utils.detect.names import Frame, Item, find_items
from utils.detect.streams import StreamSource
from utils.detect.writers import Pictures

NONE = torch.zeros(0, 6)


def test_two_streams_one_of_which_comes_back(caplog):
    caplog.set_level(logging.INFO)
    with camera([10, 10_000]) as (first, connections), camera([10_000]) as (second, _):
        source = StreamSource(find_items([first, second]), lambda image: image.transpose(2, 0, 1))
        shades = {first: set(), second: set()}
        for batch in source:
            for frame in batch:
                shades[frame.item.path].add(round(int(frame.image.mean()) / 40))
            if len(shades[first]) > 1:
                source.close()
    assert len(connections) == 2 and shades == {first: {1, 2}, second: {1}}
    assert [text for text in caplog.messages if first in text][:2] == [
        f"{first} is lost; it is opened again when it comes back", f"{first} is back",
    ]  # fmt: skip
    assert not any(reader.is_alive() for reader in source.readers)


def test_one_of_two_is_not_there(caplog):
    """No stream is lost before it was tried; the one that answers is used at once."""
    caplog.set_level(logging.INFO)
    with camera([10_000]) as (address, _), camera([10_000]) as (other, _):
        source = StreamSource(find_items([address, other, "http://127.0.0.1:9/x"]), lambda image: image)
        seen = set()
        for batch in source:
            seen |= {frame.item.path for frame in batch}
            if len(seen) == 2 and caplog.messages:
                source.close()
    assert [text.partition(" is lost")[0] for text in caplog.messages] == ["http://127.0.0.1:9/x"]


def test_what_is_no_stream_is_refused_whatever_opening_it_raises():
    for address, message in (("7" * 5000, "cannot be opened"), ("rtsp://[host", "is no address")):
        with pytest.raises(ValueError, match=message):
            StreamSource(find_items([address]), lambda image: image)


def test_a_video_behind_an_address_is_read_once_and_whole(tmp_path):
    """However slow the reader is."""
    write_film(tmp_path / "film.mp4", num_frames=8)
    with file_server(tmp_path) as address:
        source = StreamSource(find_items([f"{address}/film.mp4"]), lambda image: image)
        frames = []
        for batch in source:
            frames += batch
            time.sleep(0.02)
    assert [frame.number for frame in frames] == list(range(1, 9))
    assert [frame.seconds for frame in frames] == [number / 20 for number in range(1, 9)]


@pytest.mark.parametrize(
    "word", ["99999999999999999999", "9999", "http://", "rtsp://\udcff", "http://127.0.0.1:99999/x"]
)
def test_no_such_camera(word):
    with pytest.raises(ValueError, match="cannot be opened: is the camera attached, the address right"):
        StreamSource(find_items([word]), lambda image: image)


def test_a_slow_reader_gets_the_newest_image():
    with camera([10_000], pause=0.01) as (address, _):
        source = StreamSource(find_items([address]), lambda image: image)
        times = []
        for (frame,) in source:
            times.append(frame.seconds)
            time.sleep(0.2)
            if len(times) == 4:
                source.close()
    assert times[3] - times[0] > 0.3, "those in between, a hundredth of a second apart, are dropped, not queued"


def test_a_stream_is_written_in_its_own_time(tmp_path):
    """Images after 0, 0.1 and 0.5 s, and 30 s later: a second of them is filled."""
    item = Item("rtsp://host/x", "stream", "x", "x", fps=20.0, num_frames=0)
    pictures = Pictures(tmp_path, ["red"])
    for number, seconds in enumerate((100.0, 100.1, 100.5, 130.5), 1):
        frame = Frame(item, picture(number), np.zeros(0), number, is_last=False, seconds=seconds)
        pictures.add(frame, NONE)
    pictures.close()
    count, fps = frames_of(tmp_path / "x.mp4")
    assert fps == 20 and abs(count - (10 + 20 + 1)) <= 1
