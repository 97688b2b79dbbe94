"""Hostile files: each gives one CompressorError, quickly, whatever its header claims."""

import json
import struct
import time

import numpy as np
import pytest
from fixtures_gguf import KIND, write
from safetensors.numpy import save, save_file

from compressor.checkpoint.integrity import scan_gguf, scan_safetensors
from compressor.errors import CompressorError


def header(**entries):
    return {name: dict(zip(("dtype", "shape", "data_offsets"), e, strict=True)) for name, e in entries.items()}


def safetensors_bytes(entries, data=b"", length=None):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ONE = ("F32", [2], [0, 8])
HUGE = 1 << 62
BAD_SAFETENSORS = {
    "empty": (b"", "truncated"),
    "seven bytes": (b"\0" * 7, "truncated"),
    "header longer than file": (
        safetensors_bytes(header(a=ONE), b"\0" * 8, 10_000),
        "truncated inside the",
    ),
    "header over 100 MB": (safetensors_bytes(header(a=ONE), b"\0" * 8, HUGE), "header too long"),
    "not json": (safetensors_bytes(b"{nope"), "not valid JSON"),
    "not utf-8": (safetensors_bytes(b'{"\xff": 1}'), "not valid JSON"),
    "array": (safetensors_bytes(b"[]"), "not a JSON object"),
    "deep": (safetensors_bytes(b'{"a":' * 200_000), "not valid JSON"),
    "huge integer": (safetensors_bytes(b'{"a":' + b"9" * 10_000 + b"}"), "not valid JSON"),
    "duplicate name": (
        safetensors_bytes(
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
            b"\0\0",
        ),
        "'a' twice",
    ),
    "duplicate key inside": (
        safetensors_bytes(b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"\0"),
        "'dtype' twice",
    ),
    "metadata of numbers": (safetensors_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
    "missing key": (safetensors_bytes({"a": {"dtype": "U8", "shape": [1]}}), "malformed entry"),
    "entry no object": (safetensors_bytes({"a": 3}), "malformed entry"),
    "unknown dtype": (safetensors_bytes(header(a=("Q4", [2], [0, 8])), b"\0" * 8), "unknown dtype"),
    "dtype no string": (safetensors_bytes(header(a=(["F32"], [2], [0, 8])), b"\0" * 8), "unknown dtype"),
    "negative size": (safetensors_bytes(header(a=("F32", [-2], [0, 8])), b"\0" * 8), "bad shape"),
    "bool size": (safetensors_bytes(header(a=("F32", [True, 2], [0, 8])), b"\0" * 8), "bad shape"),
    "float size": (safetensors_bytes(header(a=("F32", [2.0], [0, 8])), b"\0" * 8), "bad shape"),
    "rank 1000": (safetensors_bytes(header(a=("F32", [1] * 1000, [0, 4])), b"\0" * 4), "bad shape"),
    "overflowing shape": (safetensors_bytes(header(a=("F32", [HUGE, 4, HUGE], [0, 0]))), "do not fit"),
    "offsets no pair": (
        safetensors_bytes(header(a=("F32", [2], [0, 8, 9])), b"\0" * 8),
        "bad data_offsets",
    ),
    "offsets reversed": (safetensors_bytes(header(a=("F32", [2], [8, 0])), b"\0" * 8), "do not fit"),
    "offsets too short": (safetensors_bytes(header(a=("F32", [2], [0, 4])), b"\0" * 4), "do not fit"),
    "overlap": (safetensors_bytes(header(a=ONE, b=("F32", [2], [4, 12])), b"\0" * 12), "'b' overlaps"),
    "hole": (safetensors_bytes(header(a=ONE, b=("F32", [1], [12, 16])), b"\0" * 16), "'b' leaves a hole"),
    "hole at the start": (safetensors_bytes(header(a=("F32", [1], [4, 8])), b"\0" * 8), "leaves a hole"),
    "truncated data": (safetensors_bytes(header(a=ONE), b"\0" * 7), "truncated"),
    "trailing data": (safetensors_bytes(header(a=ONE), b"\0" * 9), "bytes after the last tensor"),
    "beyond the file": (safetensors_bytes(header(a=("F32", [HUGE], [0, 4 * HUGE]))), "bad data_offsets"),
}


@pytest.mark.parametrize("case", BAD_SAFETENSORS)
def test_bad_safetensors_files_are_refused(tmp_path, case):
    content, message = BAD_SAFETENSORS[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    start = time.perf_counter()
    with pytest.raises(CompressorError) as caught:
        scan_safetensors(path)
    assert time.perf_counter() - start < 2
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1200


def test_truncation_names_both_sizes(tmp_path):
    path = tmp_path / "model.safetensors"
    content = save({"w": np.zeros((4, 8), np.float32)})
    path.write_bytes(content[:-5])
    with pytest.raises(CompressorError) as caught:
        scan_safetensors(path)
    assert caught.value.got == f"{len(content) - 5} bytes"
    assert caught.value.expected == f"{len(content)} bytes"


def test_every_prefix_of_a_file_is_refused(tmp_path):
    content = save({"a": np.ones((2, 3), np.float16), "b": np.ones(3, np.int8)})
    path = tmp_path / "cut.safetensors"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CompressorError):
            scan_safetensors(path)


def test_good_safetensors_are_read_as_the_library_wrote_them(tmp_path):
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.arange(5, dtype=np.int8)}
    arrays |= {"scalar": np.array(7, np.int64), "empty": np.zeros((0, 3), np.float16)}
    path = tmp_path / "good.safetensors"
    save_file(arrays, path, {"format": "np"})
    content, found = path.read_bytes(), scan_safetensors(path)
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        assert found[name].shape == array.shape
        assert content[found[name].start : found[name].end] == array.tobytes()


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name, kind, value=b""):
    return text(name) + struct.pack("<I", kind) + value


def info(name="w", sizes=(32, 2), kind=0, offset=0):
    return (
        text(name) + struct.pack("<I", len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
        + struct.pack("<IQ", kind, offset)
    )  # fmt: skip


def gguf_bytes(
    keys=(), infos=(), data=0, *, version=3, magic=b"GGUF", n_keys=None, n_infos=None, align=32, endian="<"
):
    head = magic + struct.pack(f"{endian}I", version)
    head += struct.pack(f"{endian}QQ", len(infos) if n_infos is None else n_infos,
                        len(keys) if n_keys is None else n_keys)  # fmt: skip
    head += b"".join(keys) + b"".join(infos)
    return head + b"\0" * (-len(head) % align) + b"\0" * data


U32 = struct.Struct("<I").pack
BAD_GGUF = {
    "empty": (b"", "truncated"),
    "magic": (gguf_bytes(magic=b"GGML"), "not a GGUF file"),
    "version 1": (gguf_bytes(version=1), "version"),
    "version 4": (gguf_bytes(version=4), "version"),
    "big endian": (gguf_bytes(endian=">"), "big-endian"),
    "many keys": (gguf_bytes(n_keys=100_001), "number of keys"),
    "many tensors": (gguf_bytes(n_infos=1 << 40), "number of tensors"),
    "keys missing": (gguf_bytes(n_keys=5, align=1), "truncated"),
    "tensors missing": (gguf_bytes(n_infos=5, align=1), "truncated"),
    "key length 2^62": (gguf_bytes([struct.pack("<Q", HUGE)]), "over the limit"),
    "key past the end": (gguf_bytes([struct.pack("<Q", 1000)]), "truncated"),
    "key not utf-8": (gguf_bytes([key(b"\xff\xfe", 4, U32(1))]), "not UTF-8"),
    "empty key": (gguf_bytes([key("", 4, U32(1))]), "is empty"),
    "duplicate key": (gguf_bytes([key("a", 4, U32(1)), key("a", 4, U32(2))]), "'a' occurs twice"),
    "unknown value type": (gguf_bytes([key("a", 13, U32(1))]), "unknown value type"),
    "boolean 2": (gguf_bytes([key("a", 7, b"\2")]), "not a boolean"),
    "string 2^62": (gguf_bytes([key("a", 8, struct.pack("<Q", HUGE))]), "over the limit"),
    "string past the end": (gguf_bytes([key("a", 8, struct.pack("<Q", 1 << 20))]), "truncated"),
    "nested array": (gguf_bytes([key("a", 9, U32(9) + struct.pack("<Q", 1))]), "array of arrays"),
    "array 2^33": (gguf_bytes([key("a", 9, U32(0) + struct.pack("<Q", 1 << 33))]), "over the limit"),
    "array past the end": (gguf_bytes([key("a", 9, U32(10) + struct.pack("<Q", 10**7))]), "truncated"),
    "strings past the end": (gguf_bytes([key("a", 9, U32(8) + struct.pack("<Q", 10**7))]), "truncated"),
    "array of unknown": (gguf_bytes([key("a", 9, U32(99) + struct.pack("<Q", 1))]), "unknown value type"),
    "alignment 0": (gguf_bytes([key("general.alignment", 4, U32(0))]), "general.alignment"),
    "alignment 24": (gguf_bytes([key("general.alignment", 4, U32(24))]), "general.alignment"),
    "alignment 2^30": (gguf_bytes([key("general.alignment", 4, U32(1 << 30))]), "general.alignment"),
    "alignment text": (gguf_bytes([key("general.alignment", 8, text("32"))]), "general.alignment"),
    "64 byte name": (gguf_bytes((), [info("n" * 64)], 256), "64 bytes"),
    "empty name": (gguf_bytes((), [info("")], 256), "0 bytes"),
    "duplicate tensor": (gguf_bytes((), [info(), info(offset=256)], 512), "listed twice"),
    "rank 0": (gguf_bytes((), [info(sizes=())], 256), "number of dimensions"),
    "rank 5": (gguf_bytes((), [info(sizes=(32, 1, 1, 1, 1))], 256), "number of dimensions"),
    "zero size": (gguf_bytes((), [info(sizes=(32, 0))], 256), "bad shape"),
    "overflowing shape": (gguf_bytes((), [info(sizes=(32, 1 << 63, 1 << 63))], 256), "ends after the file"),
    "unknown ggml type": (gguf_bytes((), [info(kind=77)], 256), "unknown ggml type"),
    "block does not divide": (gguf_bytes((), [info(sizes=(48, 2), kind=2)], 256), "multiple of 32"),
    "offset off": (gguf_bytes((), [info(offset=32)], 512), "not contiguous"),
    "overlap": (gguf_bytes((), [info("a"), info("b", offset=0)], 512), "not contiguous"),
    "hole": (gguf_bytes((), [info("a"), info("b", offset=512)], 1024), "not contiguous"),
    "unaligned next": (gguf_bytes((), [info("a", (8,)), info("b", offset=33)], 1024), "not contiguous"),
    "truncated data": (gguf_bytes((), [info()], 255), "ends after the file"),
    "offset near 2^64": (gguf_bytes((), [info(offset=2**64 - 32)], 256), "not contiguous"),
}


@pytest.mark.parametrize("case", BAD_GGUF)
def test_bad_gguf_files_are_refused(tmp_path, case):
    content, message = BAD_GGUF[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    start = time.perf_counter()
    with pytest.raises(CompressorError) as caught:
        scan_gguf(path)
    assert time.perf_counter() - start < 2
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_every_prefix_of_a_gguf_is_refused(tmp_path):
    keys = [key("a", 8, text("b")), key("c", 9, U32(4) + struct.pack("<Q", 2) + U32(1) * 2)]
    content = gguf_bytes(keys, [info("x"), info("y", (32,), 8, 256)], 290)
    path = tmp_path / "cut.gguf"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CompressorError):
            scan_gguf(path)
    path.write_bytes(content)
    assert list(scan_gguf(path).tensors) == ["x", "y"]


def test_good_gguf_is_read_as_the_reference_reader_reads_it(tmp_path, tiny_llama):
    import gguf

    path = write(tmp_path / "m.gguf", tiny_llama, KIND.Q4_1, extra=[("flag", True, 7), ("x", [1, 2, 3], 9)])
    found, reference = scan_gguf(path), gguf.GGUFReader(path)
    assert [t.name for t in reference.tensors] == list(found.tensors)
    for tensor in reference.tensors:
        ours = found.tensors[tensor.name]
        assert (ours.type_name, ours.shape[::-1]) == (tensor.tensor_type.name, tuple(tensor.shape))
        assert (ours.start, ours.nbytes) == (tensor.data_offset, tensor.n_bytes)
    assert len(found.fields) == 20
    for name, value in found.fields.items():
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == reference.fields[name].contents()


SCALARS = [(0, "B", 200), (1, "b", -3), (2, "H", 65535), (3, "h", -300), (4, "I", 2**32 - 1), (5, "i", -5)]
SCALARS += [(6, "f", 0.5), (10, "Q", 2**63), (11, "q", -(2**60)), (12, "d", 0.1)]


@pytest.mark.parametrize(("kind", "code", "value"), SCALARS)
def test_every_scalar_type_is_read(tmp_path, kind, code, value):
    path = tmp_path / "one.gguf"
    path.write_bytes(gguf_bytes([key("k", kind, struct.pack(f"<{code}", value)), key("flag", 7, b"\1")]))
    fields = scan_gguf(path).fields
    assert fields["k"] == value
    assert fields["flag"] is True
