"""The two containers that torch.save writes, as far as this project reads them: what the pickle and the tensors lie in.

A zip archive since torch 1.6, pickles followed by raw numbers before. Members of the archive are read at their places
in the file and never unpacked, so that no more memory is taken than the file has bytes.
"""

import io
import struct
from dataclasses import dataclass
from pickle import UnpicklingError

import torch

from utils.engine.stand_ins import Storage
from utils.engine.unpickler import MAX_BYTES, Unpickler

MAX_DIRECTORY = 16 << 20  # bytes that the list of members may have; the largest model's has 0.2 million
LEGACY_MAGIC, LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
END, END_64, ENTRY, LOCAL = b"PK\5\6", b"PK\6\6", b"PK\1\2", b"PK\3\4"
REPACKED = "as if it had been unpacked and packed again; take the file as torch.save wrote it"


@dataclass(frozen=True)
class Member:
    """A file in a zip archive: bytes, whether they are stored as they are, and where its local header begins."""

    size: int
    is_plain: bool
    header: int


def members(file, size):
    """{name: Member} of the zip archive in the open binary `file` of `size` bytes.

    Raises ValueError when its end is missing or its directory cannot be.
    """
    tail_start = max(0, size - 65557)  # the end may be followed by a comment
    file.seek(tail_start)
    tail = file.read()
    at = tail.rfind(END)
    if at < 0 or len(tail) - at < 22:
        raise ValueError("it is cut off: the end of the archive is missing, so the download or the copy did not finish")
    length, start = struct.unpack_from("<LL", tail, at + 12)
    if at >= 76 and tail[at - 76 : at - 72] == END_64:  # torch.save writes the end in both forms
        length, start = struct.unpack_from("<QQ", tail, at - 76 + 40)
    if length > MAX_DIRECTORY or start + length > tail_start + at:
        raise ValueError("the directory of its archive is damaged, or lists more members than any checkpoint has")
    file.seek(start)
    return _entries(file.read(length))


def _entries(directory):
    found, at = {}, 0
    while at < len(directory):
        fields = struct.unpack_from("<4s4B4HL2L5H2L", directory, at)
        signature, flags, method = fields[0], fields[5], fields[6]
        packed, size, name_length, extra_length, comment_length = fields[10:15]
        name = directory[at + 46 : at + 46 + name_length].decode("utf-8", "replace")
        extra = directory[at + 46 + name_length : at + 46 + name_length + extra_length]
        if signature != ENTRY:
            raise ValueError("the directory of its archive is damaged")
        if name in found:
            raise ValueError(f"its archive has two members of the name {name[:100]!r}")
        size, packed, header = _long_form(extra, size, packed, fields[18])
        found[name] = Member(size, method == 0 and not flags & 1 and size == packed, header)
        at += 46 + name_length + extra_length + comment_length
    return found


def _long_form(extra, *numbers):
    """`numbers` with those that need more than 4 bytes taken from the field of zip64."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            longs = [value for (value,) in struct.iter_unpack("<Q", extra[at + 4 : at + 4 + length // 8 * 8])][::-1]
            return [longs.pop() if number == 0xFFFFFFFF else number for number in numbers]
        at += 4 + length
    return numbers


def load(file, size):
    """The content of the open .pt `file` of `size` bytes, in either form."""
    file.seek(0)
    is_archive = file.read(4) == LOCAL
    return _load_archive(file, size) if is_archive else _load_legacy(file, size)


def _load_archive(file, size):
    found = members(file, size)
    (root,) = [name.removesuffix("data.pkl") for name in found if name.endswith("data.pkl") and name.count("/") < 2]
    inside = {name.removeprefix(root): member for name, member in found.items() if name.startswith(root)}
    if root == "" or not all(member.is_plain for member in found.values()):
        raise ValueError(f"its archive is compressed or has no folder, {REPACKED}")
    if sum(member.size for member in found.values()) > size:
        raise ValueError("the members of its archive overlap")
    if inside["data.pkl"].size > MAX_BYTES:
        raise UnpicklingError(f"more than {MAX_BYTES >> 20} MB of it are not tensors")
    if "byteorder" in inside and _bytes(file, size, inside["byteorder"]).numpy().tobytes() != b"little":
        raise ValueError("it was written on a machine of another byte order; save it again on a usual one")
    storages = {}

    def open_storage(dtype, key, number):
        if key not in storages:
            member = inside.get(f"data/{key}")
            if member is None or member.size < number * dtype.itemsize:
                raise ValueError(f"the tensor data/{key[:100]} is missing in it, or shorter than it should be")
            storages[key] = _bytes(file, size, member).untyped_storage()
        return Storage(dtype, storages[key])

    pickled = _bytes(file, size, inside["data.pkl"]).numpy().tobytes()
    return Unpickler(io.BytesIO(pickled), open_storage).load()


def _bytes(file, size, member):
    """The content of a member as a tensor of bytes."""
    file.seek(member.header)
    header = file.read(30)
    if len(header) < 30 or header[:4] != LOCAL:
        raise ValueError("a member of its archive is not where the directory says")
    start = member.header + 30 + sum(struct.unpack_from("<HH", header, 26))
    if start + member.size > size:
        raise ValueError("it is cut off: a member of its archive reaches beyond the end")
    file.seek(start)
    return _fill(file, torch.empty(member.size, dtype=torch.uint8))


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
