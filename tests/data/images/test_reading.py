import io
import os
import struct
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image

from tests import golden_data, parity
from utils.data.images import reading

SMALL = np.random.default_rng(0).integers(0, 256, (3, 4, 3), dtype=np.uint8)
IMAGE = np.kron(SMALL, np.ones((8, 8, 1), np.uint8))  # RGB [24 x 32 x 3], blocks, so that JPEG hardly changes it
LARGE = np.kron(IMAGE, np.ones((5, 5, 1), np.uint8))  # [120 x 160 x 3]: more pixel data than tables in a JPEG
FORMATS = {
    "png": {},
    "jpg": {"quality": 100, "subsampling": 0},
    "webp": {"lossless": True},
    "tif": {},
    "bmp": {},
    "mpo": {"quality": 100, "subsampling": 0, "save_all": True, "append_images": [Image.fromarray(IMAGE)]},
}
UPRIGHT = {  # what has to be done to the stored raster, from the EXIF standard
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: np.rot90(a, 2),
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
    8: lambda a: np.rot90(a, 1),
}


def save(path, suffix, orientation=1, raster=IMAGE):
    image = Image.fromarray(raster)
    exif = Image.Exif()
    exif[274] = orientation
    extra = {"tiffinfo": {274: orientation}} if suffix == "tif" else {} if suffix == "bmp" else {"exif": exif}
    image.save(path, **FORMATS[suffix], **extra)
    return path


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tif", "mpo"])
def test_pixels_and_size_are_upright(tmp_path, suffix, orientation):
    file = save(tmp_path / f"a.{suffix}", suffix, orientation)
    expected = UPRIGHT[orientation](IMAGE)[..., ::-1]
    actual = reading.read_image(file)
    assert actual.shape == expected.shape
    assert np.abs(actual.astype(int) - expected).max() <= 1
    assert actual.flags.c_contiguous
    assert reading.image_size(file) == reading.verify_image(file) == actual.shape[1::-1]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_deep_tiffs_are_upright(tmp_path, orientation):
    raster = np.asarray(Image.fromarray(IMAGE).convert("L"))
    expected = UPRIGHT[orientation](raster[..., None])
    for name, samples in {"float": raster / np.float32(255), "int": raster.astype(np.int32)}.items():
        file = tmp_path / f"{name}.tif"
        Image.fromarray(samples).save(file, tiffinfo={274: orientation})
        np.testing.assert_array_equal(reading.read_image(file), np.repeat(expected, 3, 2))
        assert reading.image_size(file) == reading.verify_image(file) == expected.shape[1::-1]


def test_exif_behind_the_pixels_of_a_png_counts(tmp_path):
    data = save(tmp_path / "a.png", "png", 6).read_bytes()
    position = data.index(b"eXIf") - 4
    length = 12 + struct.unpack(">I", data[position : position + 4])[0]
    chunk = data[position : position + length]
    end = len(data) - 12
    (tmp_path / "a.png").write_bytes(data[:position] + data[position + length : end] + chunk + data[end:])
    assert reading.image_size(tmp_path / "a.png") == reading.read_image(tmp_path / "a.png").shape[1::-1] == (24, 32)


def exif_block(order, kind, packed):
    """EXIF with nothing but an orientation, whose value of the type `kind` is `packed` in four bytes."""
    start = {"<": b"II*\0", ">": b"MM\0*"}[order]
    return start + struct.pack(f"{order}IHHHI", 8, 1, 274, kind, 1) + packed.ljust(4, b"\0") + bytes(4)


def jpeg_with(block, folder):
    """A file in `folder` with the EXIF data `block`."""
    file = folder / "a.jpg"
    Image.fromarray(IMAGE).save(file)
    data, length = file.read_bytes(), struct.pack(">H", len(block) + 8)
    file.write_bytes(data[:2] + b"\xff\xe1" + length + b"Exif\0\0" + block + data[2:])
    return file


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(("kind", "form"), [(1, "B"), (3, "H"), (4, "I")])
def test_orientation_of_any_type_counts_as_for_opencv(tmp_path, order, kind, form):
    file = jpeg_with(exif_block(order, kind, struct.pack(order + form, 6)), tmp_path)
    assert reading.image_size(file) == reading.read_image(file).shape[1::-1]


def test_exif_that_begins_in_another_way_does_not_count(tmp_path):
    file = jpeg_with(b"II+\0" + exif_block("<", 3, b"\6")[4:], tmp_path)
    assert reading.image_size(file) == reading.read_image(file).shape[1::-1] == (32, 24)


@pytest.mark.parametrize(("prefix", "size"), [(b"", (24, 32)), (b"Exif\0\0", (32, 24))])
def test_exif_of_a_png_that_libpng_refuses_does_not_count(tmp_path, prefix, size):
    Image.fromarray(IMAGE).save(tmp_path / "a.png")
    data, chunk = (tmp_path / "a.png").read_bytes(), b"eXIf" + prefix + exif_block("<", 3, b"\6")
    chunk = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    (tmp_path / "a.png").write_bytes(data[:33] + chunk + data[33:])  # behind the header
    assert reading.image_size(tmp_path / "a.png") == reading.read_image(tmp_path / "a.png").shape[1::-1] == size


@pytest.mark.parametrize(
    ("suffix", "modes"),
    [
        ("png", "1 L LA P RGB RGBA"),
        ("jpg", "1 L RGB CMYK"),
        ("tif", "1 L LA P RGB RGBA CMYK"),
        ("bmp", "1 L P RGB RGBA"),
        ("webp", "L RGB RGBA"),
    ],
)
def test_ordinary_files_equal_imread(tmp_path, suffix, modes):
    for mode in modes.split():
        file = tmp_path / f"ü {mode}.{suffix}"
        Image.fromarray(IMAGE).convert(mode).save(file)
        np.testing.assert_array_equal(reading.read_image(file), cv2.imread(str(file)))


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize("channels", [1, 3])
def test_16_bit_files_equal_imread_and_keep_the_upper_byte(tmp_path, suffix, channels):
    samples = np.random.default_rng(1).integers(0, 65536, (20, 30, channels)).astype(np.uint16)
    file = tmp_path / f"a.{suffix}"
    cv2.imwrite(str(file), samples)
    actual = reading.read_image(file)
    np.testing.assert_array_equal(actual, cv2.imread(str(file)))
    assert np.abs(actual.astype(int) - (samples >> 8)).max() <= 1  # TIFF in colour: OpenCV rounds in its own way


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (np.array([0, 0.5, 1], np.float32), [0, 128, 255]),
        (np.array([-1, 0.4, 100.6, 255], np.float32), [0, 0, 101, 255]),
        (np.array([np.nan, 0, 1]), [0, 0, 255]),
        (np.array([0, 257, 65535.0]), [0, 1, 255]),
        (np.array([-5, 0, 255], np.int32), [0, 0, 255]),
        (np.array([0, 256, 65535], np.int32), [0, 1, 255]),
        (np.array([0, 2**24, 2**32 - 1], np.uint32), [0, 1, 255]),
        (np.array([255, 256, 65535], np.uint16), [0, 1, 255]),
        (np.zeros(0, np.float32), []),
    ],
)
def test_rules_for_other_sample_types(samples, expected):
    assert reading.to_8bit(samples).dtype == np.uint8
    assert reading.to_8bit(samples).tolist() == expected


def test_colour_float_tiff(tmp_path):
    file = tmp_path / "a.tif"
    cv2.imwrite(str(file), IMAGE.astype(np.float32) / 255, (cv2.IMWRITE_TIFF_COMPRESSION, 1))
    np.testing.assert_array_equal(reading.read_image(file), IMAGE)
    assert reading.verify_image(file) == (32, 24)


def test_golden_images_have_their_golden_sizes():
    for item in golden_data.index()["a_parsed_all"]["items"]:
        file = golden_data.FOLDER / "dataset" / item["img"]
        sizes = reading.image_size(file), reading.verify_image(file), reading.read_image(file).shape[1::-1]
        parity.check("data: picture sizes", item["img"], sizes, [item["wh"]] * 3)


# --- broken files -----------------------------------------------------------------------------------------------------


def jpeg(**options):
    stream = io.BytesIO()
    Image.fromarray(LARGE).save(stream, "JPEG", **options)
    return stream.getvalue()


def with_thumbnail(data):
    """A JPEG whose header holds a complete small JPEG, with an end marker of its own."""
    segment = b"Thumb\0" + jpeg()
    return data[:2] + b"\xff\xe3" + struct.pack(">H", len(segment) + 2) + segment + data[2:]


@pytest.mark.parametrize(
    "data",
    [jpeg(), jpeg(progressive=True), jpeg() + bytes(10), jpeg() + b"x" * 20_000, with_thumbnail(jpeg())],
    ids=["baseline", "progressive", "padded", "trailer", "thumbnail"],
)
def test_complete_jpegs_pass(tmp_path, data):
    (tmp_path / "a.jpg").write_bytes(data)
    assert reading.verify_image(tmp_path / "a.jpg") == (160, 120)


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
@pytest.mark.parametrize("tail", [b"", bytes(5000)], ids=["cut", "zeros"])
def test_truncated_jpegs_are_found(tmp_path, capfd, options, tail):
    data = jpeg(**options)
    for whole in (data, with_thumbnail(data)):
        for missing in (1, 2, 10, len(data) // 2):
            (tmp_path / "a.jpg").write_bytes(whole[:-missing] + tail)
            with pytest.raises(ValueError, match="truncated JPEG"):
                reading.verify_image(tmp_path / "a.jpg")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_jpegs_that_no_decoder_reads_are_found(tmp_path, options):
    data = jpeg(**options)
    tables = data.index(b"\xff\xc4") + 4  # of the Huffman codes
    file = tmp_path / "a.jpg"
    file.write_bytes(data[:tables] + b"\xff" * 20 + data[tables + 20 :])
    with pytest.raises(ValueError, match="a.jpg: not a readable image"):
        reading.read_image(file)
    with pytest.raises(ValueError, match="truncated or broken"):
        reading.verify_image(file)


@pytest.mark.parametrize("suffix", ["png", "tif", "webp", "bmp"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_other_truncated_files_are_found(tmp_path, capfd, suffix, share):
    data = save(tmp_path / f"whole.{suffix}", suffix).read_bytes()
    file = tmp_path / f"a.{suffix}"
    file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ValueError, match="truncated or broken|not an image|not a readable|broken header"):
        reading.verify_image(file)
    assert "libpng" not in capfd.readouterr().err


def test_flipped_bits_in_a_png_are_found(tmp_path):
    data = bytearray(save(tmp_path / "a.png", "png").read_bytes())
    data[data.index(b"IDAT") + 10] ^= 0xFF
    (tmp_path / "a.png").write_bytes(data)
    with pytest.raises(ValueError, match="truncated or broken"):
        reading.verify_image(tmp_path / "a.png")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (b"<html></html>", "not an image but a web page"),
        (b"\n <!DOCTYPE HTML>", "not an image but a web page"),
        (b"<svg></svg>", "not an image but an SVG drawing"),
        (b"<?xml version='1.0'?><svg/>", "not an image but an XML file .an SVG drawing"),
        (b"version https://git-lfs.github.com/spec/v1\n", "not an image but a Git LFS pointer"),
        (b"%PDF-1.7", "not an image but a PDF"),
        (b"\xff\x0a" + bytes(20), "not an image but a JPEG XL image"),
        (b"\0\0\0\x18ftypheic" + bytes(40), "not an image but a file of the kind heic .*convert it to jpg"),
        (b"FUJIFILMCCD-RAW ", "not an image but a raw file of a camera"),
        (b"0 0.5 0.5 0.1 0.1", "not an image$"),
        (b"\xff\xd8\xff", "not an image$"),
        (b"II*\0\x08\0\0\0", "not a readable TIFF"),
    ],
)
def test_reasons(tmp_path, data, reason):
    file = tmp_path / "a.jpg"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=reason):
        reading.verify_image(file)
    for read in (reading.read_image, reading.image_size):
        with pytest.raises(ValueError, match="a.jpg: ") as error:
            read(file)
        assert " object at " not in str(error.value)


def test_content_decides_not_the_suffix(tmp_path):
    Image.fromarray(IMAGE).save(tmp_path / "a.gif")
    (tmp_path / "a.gif").rename(tmp_path / "a.png")
    with pytest.raises(ValueError, match="content is GIF"):
        reading.verify_image(tmp_path / "a.png")
    Image.fromarray(IMAGE).save(tmp_path / "b.png")
    (tmp_path / "b.png").rename(tmp_path / "b.jpg")
    assert reading.verify_image(tmp_path / "b.jpg") == (32, 24)


def test_ten_pixels_are_enough(tmp_path):
    for side, fits in ((9, False), (10, True)):
        Image.new("RGB", (40, side)).save(tmp_path / "a.png")
        if fits:
            assert reading.verify_image(tmp_path / "a.png") == (40, 10)
        else:
            with pytest.raises(ValueError, match="smaller than 10 pixels"):
                reading.verify_image(tmp_path / "a.png")


def test_missing_file_and_folder(tmp_path):
    for path in (tmp_path, tmp_path / "none.jpg"):
        with pytest.raises(ValueError, match="cannot be opened"):
            reading.verify_image(path)
        with pytest.raises(ValueError, match=path.name):
            reading.read_image(path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.jpg")
    with pytest.raises(ValueError, match="cannot be opened"):
        reading.verify_image(tmp_path / "a.jpg")


def test_a_broken_exif_block_does_no_harm(tmp_path):
    file = save(tmp_path / "a.jpg", "jpg", 6)
    data = file.read_bytes()
    start = data.index(b"Exif\0\0") + 6
    for garbage in (bytes(8), b"\xff" * 8, b"MM\0*\xff\xff\xff\xff"):
        file.write_bytes(data[:start] + garbage + data[start + 8 :])
        assert reading.verify_image(file) == reading.read_image(file).shape[1::-1] == (32, 24)


def tiff(samples, photometric=2, planar=1):
    """An uncompressed TIFF of samples [h x w x bands], as Pillow writes none of more than four bands."""
    height, width, bands = samples.shape
    data = (samples if planar == 1 else samples.transpose(2, 0, 1)).tobytes()
    strips = bands if planar == 2 else 1
    kind = {"u": 1, "i": 2, "f": 3}[samples.dtype.kind]
    tags = {256: width, 257: height, 258: [samples.itemsize * 8] * bands, 259: 1, 262: photometric,
            273: [0] * strips, 277: bands, 278: height, 279: [len(data) // strips] * strips, 284: planar,
            338: [0] * max(bands - 3, 0), 339: [kind] * bands}  # fmt: skip
    tags = {tag: value if isinstance(value, list) else [value] for tag, value in tags.items() if value != []}
    start = 8 + 2 + 12 * len(tags) + 4
    sizes = {tag: 4 * len(value) if len(value) > 1 else 0 for tag, value in tags.items()}
    first = start + sum(sizes.values())
    tags[273] = [first + len(data) // strips * strip for strip in range(strips)]
    entries, values = b"", b""
    for tag, value in tags.items():
        packed = struct.pack(f"<{len(value)}I", *value)
        place = packed if len(value) == 1 else struct.pack("<I", start + len(values))
        values += packed if len(value) > 1 else b""
        entries += struct.pack("<HHI", tag, 4, len(value)) + place
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + values + data


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.float32, np.float64])
@pytest.mark.parametrize("bands", [3, 5, 7, 8, 12])
@pytest.mark.parametrize("planar", [1, 2])
def test_tiffs_of_many_bands(tmp_path, capfd, caplog, kind, bands, planar):
    """The first three bands where Pillow knows which they are, else one sentence; no library prints a word."""
    values = np.random.default_rng(0).random((32, 24, bands)) * {np.uint8: 255, np.uint16: 65535}.get(kind, 1)
    (tmp_path / "a.tif").write_bytes(tiff(values.astype(kind), planar=planar))
    is_mixed = bands == 3 and planar == 2 and kind is not np.uint8
    said = "bits whose bands lie one after the other" if is_mixed else f"{bands} bands, at most 4 are supported"
    try:
        assert reading.verify_image(tmp_path / "a.tif") == (24, 32)
        pixels, expected = reading.read_image(tmp_path / "a.tif"), reading.to_8bit(values.astype(kind))[..., 2::-1]
        assert np.abs(pixels.astype(int) - expected).max() <= (kind is np.uint16)  # OpenCV rounds
        assert not is_mixed
    except ValueError as error:
        assert (bands > 3 or is_mixed) and said in str(error)
    if is_mixed:
        with pytest.raises(ValueError, match=said):
            reading.read_image(tmp_path / "a.tif")
    out, err = capfd.readouterr()
    assert (out, err, caplog.text) == ("", "", "")


@pytest.mark.parametrize("kind", ["WEBP", "PNG", "TIFF"])
def test_the_first_of_several_frames(tmp_path, kind):
    frames = [Image.fromarray(IMAGE), Image.fromarray(255 - IMAGE)]
    file = tmp_path / f"a.{kind.lower()}"
    frames[0].save(
        file, kind, save_all=True, append_images=frames[1:], **({"lossless": True} if kind == "WEBP" else {})
    )
    assert reading.verify_image(file) == (32, 24)
    assert np.array_equal(reading.read_image(file)[..., ::-1], IMAGE)
