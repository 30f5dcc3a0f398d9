"""Looks at every node before a run: launched like the run, with the same arguments.

    deepspeed --hostfile hosts --module pretrain.preflight --ds_config ... --config ...
    torchrun --nnodes 4 --nproc-per-node 8 ... -m pretrain.preflight --ds_config ... --config ...

Each node's first rank collects what must be alike or suffice; all of it comes together over the network that the run
will use, and rank 0 tells which node differs from the others, in what. Leaves with 0 where the run may begin, else
with Exit.NODES_DIFFER. That the ranks found each other at all means that the master port was free and reachable.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data_prep.durable import sha256_of_file
from data_prep.manifest import MANIFEST_NAME
from pretrain.config import RunConfig
from pretrain.config_file import load_config
from pretrain.ds_config import load_ds_config
from pretrain.errors import USER_ERRORS
from pretrain.exit_codes import Exit
from pretrain.provenance import PACKAGES, git_revision
from pretrain.ranks import Ranks, end_process, process_group
from pretrain.run import parse_arguments

RENDEZVOUS_SECONDS = 120.0
CLOCK_SECONDS = 2.0
"""Clocks may differ by that much: times in logs and of files would mislead."""
BYTES_PER_PARAMETER = 14
"""Of a checkpoint: bf16 weight, fp32 master and two moments."""

FAULTS: tuple[type[Exception], ...] = (*USER_ERRORS, OSError)

Facts = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    ranks = Ranks.from_environment()
    with process_group(ranks, RENDEZVOUS_SECONDS):
        mine = facts_of_node(args.config, args.ds_config, [*args.overrides, *args.resume_override], ranks)
        mine |= shared_folder(mine, ranks)
        everyone: list[Facts] = [{}] * ranks.world_size
        dist.all_gather_object(everyone, mine)
    nodes = [facts for facts in everyone if facts["local_rank"] == 0]
    for facts in nodes:
        facts["ranks"] = sum(other["host"] == facts["host"] for other in everyone)
    faults = [fault for facts in everyone for fault in facts["faults"]] + differences(nodes)
    if ranks.is_main:
        report(nodes, faults)
    return Exit.NODES_DIFFER if faults else Exit.COMPLETE


def facts_of_node(config_file: Path, ds_config_file: Path, overrides: Sequence[str], ranks: Ranks) -> Facts:
    """What this rank sees. A mistake in the files is a fact of the node too: it must not keep the others waiting."""
    facts: Facts = {"host": socket.gethostname(), "rank": ranks.rank, "local_rank": ranks.local_rank, "faults": []}
    dist.barrier()
    facts["clock"] = time.time()  # all ranks leave a barrier within a moment
    alike = facts["alike"] = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    alike["git revision"] = git_revision()
    alike["GPUs"] = torch.cuda.device_count()
    if torch.cuda.is_available():
        alike["GPU"] = torch.cuda.get_device_name(ranks.local_rank)
        alike["CUDA"] = torch.version.cuda
        alike["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    try:
        alike["configuration"] = sha256_of_file(config_file)
        alike["DeepSpeed configuration"] = sha256_of_file(ds_config_file)
        config = load_config(config_file, overrides)  # which opens every shard and compares its size
        load_ds_config(ds_config_file, config, ranks.world_size)
        facts["out"] = config.out
        alike["dataset manifest"] = " ".join(
            sha256_of_file(Path(source.path) / MANIFEST_NAME) for source in config.data.sources
        )
        if ranks.local_rank == 0:
            check_disk(config)
    except FAULTS as error:
        facts["faults"].append(f"{facts['host']}: {error}")
    return facts


def check_disk(config: RunConfig) -> None:
    """Room for one checkpoint more than are kept, in the run folder or in what there is of its path."""
    from deeploop_model import DeepLoopModel

    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in DeepLoopModel(config.model).parameters())
    needed = parameters * BYTES_PER_PARAMETER * (config.checkpoint.keep_last + 1)
    folder = Path(config.out).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"{folder}: {free / 1e9:.1f} GB are free, {config.checkpoint.keep_last + 1} checkpoints take "
            f"{needed / 1e9:.1f} GB"
        )


def shared_folder(facts: Facts, ranks: Ranks) -> Facts:
    """Whether this rank sees what rank 0 writes into the run folder."""
    told: list[Any] = [None]
    probe = None
    if ranks.is_main and "out" in facts:
        try:
            probe = Path(facts["out"]) / f".preflight_{uuid.uuid4().hex}"
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.write_text(json.dumps(facts["host"]))
            told = [probe.name]
        except OSError as error:
            facts["faults"].append(f"{facts['host']}: out: {facts['out']}: cannot be written: {error.strerror}")
    dist.broadcast_object_list(told, src=0)
    faults = list(facts["faults"])
    if told[0] is not None and "out" in facts and ranks.local_rank == 0 and not _appears(Path(facts["out"]) / told[0]):
        faults.append(f"{facts['host']}: out: {facts['out']} is not the folder that rank 0 writes to")
    dist.barrier()
    if probe is not None:
        probe.unlink(missing_ok=True)
    return {"faults": faults}


def _appears(path: Path, seconds: float = 5.0) -> bool:
    """Network file systems may take a moment to show a new file."""
    deadline = time.monotonic() + seconds
    while not os.access(path, os.R_OK):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def differences(nodes: Sequence[Facts]) -> list[str]:
    """One line for every node and thing in which it is not like most of the others."""
    hosts = [facts["host"] for facts in nodes]
    faults = _odd_ones(hosts, "ranks", [facts["ranks"] for facts in nodes])
    for name in dict.fromkeys(name for facts in nodes for name in facts["alike"]):
        faults += _odd_ones(hosts, name, [facts["alike"].get(name, "missing") for facts in nodes])
    clocks = [facts["clock"] for facts in nodes]
    middle = sorted(clocks)[len(clocks) // 2] if len(clocks) > 2 else clocks[0]
    for host, clock in zip(hosts, clocks, strict=True):
        if abs(clock - middle) > CLOCK_SECONDS:
            faults.append(f"{host}: its clock is {clock - middle:+.1f} s off the others'")
    return faults


def _odd_ones(hosts: Sequence[str], name: str, values: Sequence[Any]) -> list[str]:
    usual, count = Counter(values).most_common(1)[0]
    # Where no value has a majority, rank 0's is as good as any: it is the one that the user started from.
    expected = usual if 2 * count > len(values) else values[0]
    return [
        f"{host}: {name} is {value}, on the other nodes {expected}"
        for host, value in zip(hosts, values, strict=True)
        if value != expected
    ]


def report(nodes: Sequence[Facts], faults: Sequence[str]) -> None:
    """What was found, on rank 0."""
    for facts in nodes:
        alike = facts["alike"]
        devices = f"{alike['GPUs']} GPUs" if alike["GPUs"] else "no GPU"
        print(
            f"{facts['host']}: {facts['ranks']} ranks, {devices}, torch {alike['torch']}, git {alike['git revision']}"
        )
    for fault in faults:
        sys.stderr.write(f"preflight: {fault}\n")
    print(f"preflight: {len(nodes)} nodes, " + (f"{len(faults)} faults" if faults else "nothing differs"), flush=True)


if __name__ == "__main__":
    end_process(main)
