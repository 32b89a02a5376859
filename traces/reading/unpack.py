"""Open a file by its first bytes: packed by gzip, bzip2, xz, zstd or zip, or as it is.

Unpacking has two bounds. A decoder may allocate 128 MiB. A file that gets over 256 MiB and
250 times longer is refused, so that a few megabytes cannot keep a command busy for minutes.
"""

import bz2
import lzma
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader, BytesIO, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, Final

from forebay.traces.ground.decoders import Decoder, GzipMember, ZstdError, zstd_decoder
from forebay.traces.ground.errors import InputError, reading

HEAD_BYTES: Final = 1 << 16
BOM: Final = b"\xef\xbb\xbf"
MAGIC_BYTES: Final = 8
MOST_TIMES_LONGER: Final = 250
"""Logs get 5 to 60 times shorter when they are packed, gzip's limit is 1,032 times."""
SURELY_SMALL_BYTES: Final = 256 << 20  # a shorter file may be packed as well as it can
DECODER_BYTES: Final = 128 << 20
WINDOW_LOG: Final = 27  # 128 MiB, the most that zstd's command reads without a further option
PIECE_BYTES: Final = 1 << 18


PACKED: Final[tuple[tuple[str, bytes, Callable[[], Decoder]], ...]] = (
    ("gzip", b"\x1f\x8b", GzipMember),
    ("bzip2", b"BZh", bz2.BZ2Decompressor),
    ("xz", b"\xfd7zXZ\x00", lambda: lzma.LZMADecompressor(memlimit=DECODER_BYTES)),
    ("zstd", b"\x28\xb5\x2f\xfd", lambda: zstd_decoder(WINDOW_LOG)),
)
DAMAGE: Final = (OSError, zlib.error, lzma.LZMAError, ZstdError, zipfile.BadZipFile,
                 NotImplementedError, RuntimeError, MemoryError)  # fmt: skip
"""Raised by the decoders for damaged files. A zip with a password raises RuntimeError."""
ZIP: Final = (b"PK\x03\x04", b"PK\x05\x06")
FOREIGN: Final = (
    (b"ORC", "an ORC file"),
    (b"Obj\x01", "an Avro file"),
    (b"SQLite format", "an SQLite database"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"\x04\x22\x4d\x18", "a file packed by lz4"),
    (b"Rar!", "a RAR archive"),
    (b"\xd0\xcf\x11\xe0", "an Excel or Word file"),
    (b"%PDF", "a PDF file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89PNG", "a picture"),
    (b"\x7fELF", "a program"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x80\x05", "a Python pickle"),
)


class _Pieces(RawIOBase):
    """A file of the pieces that a function returns. An empty piece is the end of the file."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        super().__init__()
        self._piece = piece

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._piece(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


class _Unpacked:
    """Unpacks a file, member after member, in pieces of any size."""

    def __init__(self, packed: BinaryIO, make: Callable[[], Decoder], kind: str, name: str) -> None:
        self._packed = packed
        self._make = make
        self._kind = kind
        self._name = name
        self._decoder = make()
        self._read = self._made = 0

    def piece(self, most: int) -> bytes:
        """Return the bytes of one step, or b"" at the end of the file.

        Raises:
            InputError: the file is damaged, is cut short, or gets too long.
        """
        try:
            piece = self._step(most)
        except DAMAGE as error:
            why = f"damaged {self._kind} file ({error})"
            raise InputError(f"{self._name}: {why}; copy it again") from error
        self._made += len(piece)
        if self._made > max(SURELY_SMALL_BYTES, MOST_TIMES_LONGER * self._read):
            raise _too_long(self._name)
        return piece

    def _step(self, most: int) -> bytes:
        while True:
            decoder = self._decoder
            if decoder.eof:
                rest = (decoder.unused_data or self._more()).lstrip(b"\0")  # zeros are padding
                if not rest and not (rest := self._more().lstrip(b"\0")):
                    return b""
                self._decoder = decoder = self._make()
            else:
                rest = self._more() if decoder.needs_input else b""
            piece = decoder.decompress(rest, most)
            if piece:
                return piece
            if not rest and decoder.needs_input and not decoder.eof:
                raise _cut_short(self._name, self._kind)

    def _more(self) -> bytes:
        piece = self._packed.read(PIECE_BYTES)
        self._read += len(piece)
        return piece


def _too_long(name: str) -> InputError:
    return InputError(
        f"{name}: gets more than {MOST_TIMES_LONGER} times longer than it is packed, which no log "
        "does; unpack it yourself if it is right"
    )


def _cut_short(name: str, kind: str) -> InputError:
    tool = {"gzip": "zcat", "bzip2": "bzcat", "xz": "xzcat", "zstd": "zstdcat"}[kind]
    file = "FILE" if name == "standard input" else name
    return InputError(
        f"{name}: the {kind} file is cut short; copy it again, or keep what is there with "
        f"{tool} {file} > part and read that with --skip-bad"
    )


class Prefixed(BytesIO):
    """A file whose first bytes were already read."""

    def __init__(self, start: bytes, file: BinaryIO) -> None:
        super().__init__()
        self._start = start
        self._file = file

    def readline(self, size: int | None = -1, /) -> bytes:
        start, self._start = self._start, b""
        if b"\n" in start:
            line, end, self._start = start.partition(b"\n")
            return line + end
        return start + self._file.readline(-1 if size is None else size)

    def read(self, size: int | None = -1, /) -> bytes:
        start, self._start = self._start, b""
        if size is None or size < 0:
            return start + self._file.read()
        return start + self._file.read(max(size - len(start), 0))

    def read1(self, size: int | None = -1, /) -> bytes:
        return self.read(size)

    def seekable(self) -> bool:
        return False


@contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    """Open `path` (`-`: standard input) for reading bytes, and unpack it if it is packed.

    Raises:
        InputError: a packed file is cut short, damaged, or gets too long.
    """
    name = "standard input" if path == "-" else path
    raw: BinaryIO = sys.stdin.buffer if path == "-" else open(path, "rb", buffering=1 << 20)  # noqa: SIM115
    try:
        with _unpacked_file(raw, name) as file:
            yield file
    finally:
        if path != "-":
            raw.close()


@contextmanager
def _unpacked_file(raw: BinaryIO, name: str) -> Iterator[BinaryIO]:
    peek = getattr(raw, "peek", None)  # a replaced standard input may lack it
    start: bytes = peek(MAGIC_BYTES)[:MAGIC_BYTES] if peek else b""
    if len(start) < MAGIC_BYTES:  # a pipe gives what was written to it so far
        start = raw.read(MAGIC_BYTES)
        raw = Prefixed(start, raw)
    for kind, magic, make in PACKED:
        if start.startswith(magic):
            yield BufferedReader(_Pieces(_Unpacked(raw, make, kind, name).piece), 1 << 20)
            return
    if start.startswith(ZIP):
        with _zip_member(raw, name) as member:
            yield member
    else:
        yield raw


@contextmanager
def _zip_member(raw: BinaryIO, name: str) -> Iterator[BinaryIO]:
    """Open the one file of a zip archive."""
    if not raw.seekable():
        raise InputError(f"{name}: a zip file cannot be read from a pipe; name the file")
    try:
        archive = zipfile.ZipFile(raw)
        members = [entry for entry in archive.infolist() if not entry.is_dir()]
        if any(entry.filename == "[Content_Types].xml" for entry in members):
            raise InputError(f"{name}: an Excel or Word file; save the table as CSV")
        if len(members) != 1:
            raise InputError(f"{name}: a zip of {len(members)} files; unpack it, and name one")
        check_member(members[0], name)
        member: Any = archive.open(members[0])
    except DAMAGE as error:
        raise _damaged_zip(name, error) from error

    def piece(most: int) -> bytes:
        try:
            return bytes(member.read1(most))
        except (*DAMAGE, EOFError) as error:
            raise _damaged_zip(name, error) from error

    with archive, member:
        yield BufferedReader(_Pieces(piece), 1 << 20)


def check_member(member: zipfile.ZipInfo, name: str, most_bytes: int | None = None) -> None:
    """Check the unpacked size that a member of a zip announces. zipfile reads no more."""
    if member.file_size > max(SURELY_SMALL_BYTES, MOST_TIMES_LONGER * member.compress_size):
        raise _too_long(name)
    if most_bytes is not None and member.file_size > most_bytes:
        raise InputError(
            f"{name}: {printable_size(member.file_size)} when it is unpacked, over the limit of "
            f"{printable_size(most_bytes)}; check that it is the right file"
        )


def printable_size(count: int) -> str:
    return f"{count / (1 << 20):,.0f} MiB"


def _damaged_zip(name: str, error: Exception) -> InputError:
    why = str(error) or type(error).__name__
    return InputError(f"{name}: damaged zip file, or one with a password ({why}); copy it again")


def read_head(path: str | Path) -> bytes:
    """Return the first bytes of `path`, unpacked. A pipe and `-` are only peeked at."""
    name, head = str(path), b""
    with reading(path):
        if name == "-":
            peek = getattr(sys.stdin.buffer, "peek", None)
            raw: BinaryIO = BytesIO(peek(HEAD_BYTES)[:HEAD_BYTES] if peek else b"")
        elif Path(path).is_file():  # reading here would take bytes from a pipe
            raw = open(path, "rb")  # noqa: SIM115
        else:
            return b""
        try:
            with raw, _unpacked_file(raw, name) as opened:
                file: Any = opened  # a step at a time, to keep the bytes before any damage
                while len(head) < HEAD_BYTES and (more := file.read1(HEAD_BYTES - len(head))):
                    head += more
        except InputError:
            pass  # the head ends at the cut, and the reader of the rest reports it
    return head.removeprefix(BOM)
