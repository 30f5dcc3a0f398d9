"""Reading `.gz` and `.zst` as a stream, with damage told apart from the end."""

from __future__ import annotations

import io
import zlib
from typing import Any, BinaryIO

from data_prep.errors import DataError
from data_prep.sources.files import InputFile

_RAW_BYTES = {"gz": 1 << 16, "zst": 1 << 12}  # small for zst: 4 KiB of it can expand to 128 MiB at once
_MAX_OUTPUT = 1 << 22


class DecompressedStream(io.RawIOBase):
    """The content of a compressed file, members and frames joined.

    A cut or corrupt archive ends the stream early and is told in `damage`; what came before is valid.
    """

    def __init__(self, file: InputFile) -> None:
        super().__init__()
        self.damage: str | None = None
        self._raw: BinaryIO = file.path.open("rb")
        self._compression = file.compression
        self._chunk_bytes = _RAW_BYTES[file.compression]
        self._codec: Any = None
        self._pending = b""
        self._output = b""
        self._error: type[Exception] = zlib.error
        self._zstd: Any = None
        if file.compression == "zst":
            self._zstd = _zstandard()
            self._error = self._zstd.ZstdError

    @property
    def consumed(self) -> int:
        """Compressed bytes read so far."""
        return self._raw.tell()

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._raw.close()
        super().close()

    def _decompress(self, data: bytes) -> bytes:
        if self._codec is None:
            self._codec = (
                zlib.decompressobj(31) if self._zstd is None else self._zstd.ZstdDecompressor().decompressobj()
            )
        if self._zstd is not None:
            output: bytes = self._codec.decompress(data)
            rest = b""
        else:
            output = self._codec.decompress(data, _MAX_OUTPUT)
            rest = self._codec.unconsumed_tail
        if self._codec.eof:
            rest = self._codec.unused_data
            self._codec = None
        self._pending = rest
        return output

    def _fill(self) -> None:
        """Makes `_output` non-empty, or leaves it empty at the end or at damage."""
        while not self._output and self.damage is None:
            data = self._pending or self._raw.read(self._chunk_bytes)
            if not data:
                if self._codec is not None or self.consumed == 0:  # an archive of nothing still has a header
                    self.damage = "truncated_archive"
                return
            if self._codec is None and self._compression == "gz" and not data.strip(b"\0"):
                self._pending = b""  # gzip allows zero padding after a member
                continue
            try:
                self._output = self._decompress(data)
            except self._error:
                self.damage = "corrupt_archive"

    def readinto(self, buffer: Any) -> int:
        self._fill()
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise DataError("a .zst input needs the package `zstandard`; pip install zstandard") from error
    return zstandard


def open_input(file: InputFile) -> tuple[io.BufferedReader, DecompressedStream | None]:
    """Opens an input for reading; the second value watches for damage and is None for plain files."""
    if not file.compression:
        return file.path.open("rb"), None
    stream = DecompressedStream(file)
    return io.BufferedReader(stream, 1 << 20), stream
