"""DeepSpeed's checkpoint files: copied to host memory at once, written later, read without running code from them.

DeepSpeed hands each file's content to a checkpoint engine. Its own engines write at once (torch), need an accelerator
(fast) or refuse CPU ranks (decoupled), and none of them leaves checksums. The one here keeps DeepSpeed's file format.
"""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from pretrain.checkpoint_store import FileRecord
from pretrain.engine import Engine
from pretrain.errors import CheckpointError

MODEL_FILE = "mp_rank_00_model_states.pt"
MODEL_FILE_STAGE3 = "zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
OPTIMIZER_FILE = "bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
SAFE_CLASSES = [LossScaler, ZeroStageEnum, fragment_address]
"""What DeepSpeed's files hold besides tensors and plain values. None of them does anything when it is built."""


class HostCopies(CheckpointEngine):  # type: ignore[misc]  # DeepSpeed carries no types
    """A checkpoint engine whose `save` copies into host memory and returns; `take` hands the copies over.

    The memory is kept and used again by the next save, and is page-locked where the tensors come from a GPU: twice
    the speed of fresh memory, at the cost of holding one copy of this rank's state for the length of the run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = "HostCopies"
        self.reader: Callable[[Path], Any] = read_file
        """How `load` reads a file; resuming at another number of ranks sets it."""
        self._pending: dict[str, Any] = {}
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def create(self, info: CheckpointCommitInfo) -> None:
        self._pending = {}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Folders are made by whoever writes the files."""

    def save(self, state_dict: Any, path: str) -> None:
        name = Path(path).name
        self._pending[name] = self._copy(name, state_dict, {})

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True

    def take(self) -> dict[str, Any]:
        """File contents by name, since the last `create`. Their memory is used again by the next save."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken, self._pending = self._pending, {}
        return taken

    def load(self, path: str, map_location: Any = None) -> Any:
        return self.reader(Path(path))

    def _copy(self, name: str, value: Any, copied: dict[Any, Tensor]) -> Any:
        if isinstance(value, Tensor):
            # Tied weights are the same tensor under two names and stay so.
            key = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype)
            if value.numel() == 0 or key not in copied:
                copied[key] = self._to_host(value.detach(), (name, len(copied)))
            return copied[key]
        if isinstance(value, dict):
            items = [(k, self._copy(name, v, copied)) for k, v in value.items()]
            return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
        if isinstance(value, list):
            return [self._copy(name, v, copied) for v in value]
        if type(value) is tuple:
            return tuple(self._copy(name, v, copied) for v in value)
        return copy.deepcopy(value)

    def _to_host(self, tensor: Tensor, key: tuple[str, int]) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)


def keep_in_host_memory(engine: Engine) -> HostCopies:
    """Makes `engine` hand its checkpoints to a HostCopies, which is returned."""
    copies = HostCopies()
    engine.checkpoint_engine = copies
    # DeepSpeed would put its recovery scripts beside the checkpoints, at once and on a disk that may be full.
    engine._copy_recovery_script = lambda save_path: None
    return copies


def content_bytes(content: Any) -> int:
    """Bytes of the tensors in a file's content: what the file takes, but for some kilobytes."""
    if isinstance(content, Tensor):
        return content.nbytes
    children = content.values() if isinstance(content, dict) else content if isinstance(content, list | tuple) else ()
    return sum(map(content_bytes, children))


def write_file(path: Path, content: Any) -> FileRecord:
    """Writes `content` in torch's format, flushes it to disk and returns its size and checksum. Raises OSError."""
    with path.open("wb") as file:
        hashed = _HashedWriter(file)
        try:
            torch.save(content, hashed)  # type: ignore[arg-type]  # it only writes and flushes
        except RuntimeError:  # torch's own words for what the file object refused
            if hashed.error is not None:
                raise hashed.error from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(hashed.bytes, hashed.digest.hexdigest())


def read_file(path: Path, mmap: bool = False) -> Any:
    """The content of one of DeepSpeed's files, on the CPU, through torch's restricted unpickler.

    With `mmap`, tensors are read from the file when they are used.
    Raises CheckpointError where the file cannot be read, or names a class that has no business in it.
    """
    try:
        with torch.serialization.safe_globals(SAFE_CLASSES):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{path}: cannot be read: {reason}") from None


class _HashedWriter:
    """A binary file object that knows what has gone through it. torch writes its files front to back."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.bytes = 0
        self.error: OSError | None = None

    def write(self, chunk: bytes) -> int:
        try:
            written = self._file.write(chunk)
        except OSError as error:
            self.error = error
            raise
        self.digest.update(chunk)
        self.bytes += written
        return written

    def flush(self) -> None:
        self._file.flush()
