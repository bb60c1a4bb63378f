"""The two containers that torch.save writes, as far as this project reads them: what the pickle and the tensors lie in.

A zip archive since torch 1.6, pickles followed by raw numbers before. Members of the archive have to lie in it as they
are, each for itself, so that no more memory is taken than the file has bytes.
"""

import io
import struct
import zipfile
from pickle import UnpicklingError

import torch

from utils.engine.stand_ins import Storage
from utils.engine.unpickler import MAX_BYTES, Unpickler

MAX_READ = 16 << 20  # bytes; a list of members is read at once, that of the largest model has 0.2 million
LEGACY_MAGIC, LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
ARCHIVE = b"PK\3\4"  # its first bytes
REPACKED = "as if it had been unpacked and packed again; take the file as torch.save wrote it"


class _ShortReads:
    """The open binary `file`, of which nobody reads more than MAX_READ bytes at once."""

    def __init__(self, file):
        self.seek, self.tell, self.seekable, self._read = file.seek, file.tell, file.seekable, file.read

    def read(self, length=-1):
        if length > MAX_READ:
            raise ValueError("the directory of its archive is damaged, or lists more members than any checkpoint has")
        return self._read(length)


def open_archive(file):
    """The zipfile.ZipFile in the open binary `file`; raises ValueError when its end is missing."""
    try:
        return zipfile.ZipFile(_ShortReads(file))
    except zipfile.BadZipFile as error:
        raise ValueError(f"the end of the archive is missing, the download or copy did not finish ({error})") from error


def load(file, size):
    """The content of the open .pt `file` of `size` bytes, in either form."""
    file.seek(0)
    is_archive = file.read(4) == ARCHIVE
    return _load_archive(file, size) if is_archive else _load_legacy(file, size)


def _load_archive(file, size):
    archive = open_archive(file)
    found = {member.filename: member for member in archive.infolist()}
    roots = [name.removesuffix("data.pkl") for name in found if name.endswith("data.pkl") and name.count("/") < 2]
    if len(roots) > 1:
        raise ValueError(f"its archive holds {len(roots)} files called data.pkl, {REPACKED}")
    root = roots[0]
    inside = {name.removeprefix(root): member for name, member in found.items() if name.startswith(root)}
    if root == "" or not all(_is_plain(member) for member in found.values()):
        raise ValueError(f"its archive is compressed or has no folder, {REPACKED}")
    if len(found) < len(archive.infolist()):
        raise ValueError("its archive has two members of one name")
    if sum(member.file_size for member in found.values()) > size:
        raise ValueError("the members of its archive overlap")
    if inside["data.pkl"].file_size > MAX_BYTES:
        raise UnpicklingError(f"more than {MAX_BYTES >> 20} MB of it are not tensors")
    if "byteorder" in inside and _bytes(archive, inside["byteorder"]).numpy().tobytes() != b"little":
        raise ValueError("it was written on a machine of another byte order; save it again on a usual one")
    storages = {}

    def open_storage(dtype, key, number):
        if key not in storages:
            member = inside.get(f"data/{key}")
            if member is None or member.file_size < number * dtype.itemsize:
                raise ValueError(f"the tensor data/{key[:100]} is missing in it, or shorter than it should be")
            storages[key] = _bytes(archive, member).untyped_storage()
        return Storage(dtype, storages[key])

    pickled = _bytes(archive, inside["data.pkl"]).numpy().tobytes()
    return Unpickler(io.BytesIO(pickled), open_storage).load()


def _is_plain(member):
    """Whether a member is stored as it is."""
    is_packed = member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size
    return not is_packed and not member.flag_bits & 1


def _bytes(archive, member):
    """The content of a member as a tensor of bytes. Raises ValueError when its check sum is another."""
    if not member.CRC:
        del member.CRC  # torch.save can be told to leave the sums out; zipfile looks at those that are there
    content = torch.empty(member.file_size, dtype=torch.uint8)
    try:
        with archive.open(member) as file:
            for part in content.split(MAX_READ):
                _fill(file, part)
    except zipfile.BadZipFile as error:
        raise ValueError(f"it is damaged, copy or download it again ({error})") from error
    return content


def _fill(file, content):
    if len(content) and file.readinto(content.numpy()) != len(content):
        raise EOFError("its end is missing")
    return content


def _load_legacy(file, size):
    """Five pickles, of which the fourth is the content and the last lists the storages, then those storages."""
    storages, left = {}, size

    def open_storage(dtype, key, number):
        nonlocal left
        if key not in storages:
            left -= number * dtype.itemsize
            if left < 0:
                raise ValueError("its tensors would have more bytes than the file, so it is cut off or damaged")
            storages[key] = dtype, torch.empty(number * dtype.itemsize, dtype=torch.uint8)
        return Storage(dtype, storages[key][1].untyped_storage())

    file.seek(0)
    unpickler = Unpickler(file, open_storage)
    if unpickler.load() != LEGACY_MAGIC:
        raise UnpicklingError("a pickle that torch.save has not written")
    if unpickler.load() != LEGACY_PROTOCOL or unpickler.load().get("little_endian") is not True:
        raise UnpicklingError("another form of torch.save")
    content, keys = unpickler.load(), unpickler.load()
    if sorted(keys) != sorted(storages):
        raise ValueError("its list of tensors is damaged")
    for key in keys:
        dtype, raw = storages[key]
        if struct.unpack("<q", file.read(8))[0] * dtype.itemsize != len(raw):
            raise ValueError("a tensor in it has another size than it should")
        _fill(file, raw)
    return content
