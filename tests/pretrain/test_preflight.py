"""The preflight names the node that differs, and in what."""

from __future__ import annotations

import re
import socket
import time
from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from pretrain import preflight
from pretrain.exit_codes import Exit
from pretrain.preflight import differences
from pretrain.ranks import Ranks, process_group
from tests.support.ranks import run_ranks
from tests.support.runs import CPU_CONFIG, small_tree, write_tree


def facts(host: str, **changed: Any) -> dict[str, Any]:
    alike = {"torch": "2.13.0", "GPUs": 8, "configuration": "abc", **changed.pop("alike", {})}
    return {"host": host, "ranks": 8, "clock": 1000.0, "alike": alike, **changed}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, []),
        ({"alike": {"torch": "2.12.1"}}, ["b: torch is 2.12.1, on the other nodes 2.13.0"]),
        ({"alike": {"configuration": "xyz"}}, ["b: configuration is xyz, on the other nodes abc"]),
        ({"alike": {"GPUs": 7}, "ranks": 7}, ["b: ranks is 7, on the other nodes 8", "b: GPUs is 7"]),
        ({"clock": 1003.0}, ["b: its clock is +3.0 s off the others'"]),
        ({"alike": {"GPU": "H100"}}, ["b: GPU is H100, on the other nodes missing"]),
    ],
)
def test_the_odd_node_is_named(changed: dict[str, Any], told: list[str]) -> None:
    found = differences([facts("a"), facts("b", **changed), facts("c")])
    assert len(found) == len(told)
    assert all(line.startswith(start) for line, start in zip(found, told, strict=True))


def test_two_nodes_are_measured_by_the_first() -> None:
    assert differences([facts("a"), facts("b", alike={"torch": "1"})]) == ["b: torch is 1, on the other nodes 2.13.0"]


Usage = namedtuple("Usage", ["total", "used", "free"])


def cases(config: Path, other_data: Path, other_out: Path) -> list[int]:
    """Exit statuses with rank 1 playing a second node in which one thing after another is wrong."""
    argv = ["--config", str(config), "--ds_config", str(CPU_CONFIG)]
    ranks = Ranks.from_environment()
    second = ranks.rank == 1
    faults: list[tuple[str, Callable[..., Any]] | list[str]] = [
        [],
        ("shutil.disk_usage", lambda path: Usage(1, 1, 10)),
        ("pretrain.preflight.version", lambda name: "0.0"),
        ("time.time", lambda: REAL_TIME() + 100),
        [f"data.path={other_data}"],
        [f"out={other_out}"],
        ["model.d_model=33"],
    ]
    found = []
    with (
        process_group(ranks),
        patch.object(preflight, "process_group", lambda *_: nullcontext()),
        patch.object(socket, "gethostname", lambda: f"node{int(second)}"),
        patch.dict("os.environ", LOCAL_RANK="0"),
    ):
        for fault in faults:
            if isinstance(fault, list):
                found.append(preflight.main(argv + (fault if second else [])))
            elif second:
                with patch(*fault):
                    found.append(preflight.main(argv))
            else:
                found.append(preflight.main(argv))
    return found


REAL_TIME = time.time


def test_two_nodes(dataset: Path, tmp_path: Path) -> None:
    config = write_tree(tmp_path / "run.yaml", small_tree(tmp_path / "out", dataset))
    other = tmp_path / "other"
    other.mkdir()
    for path in dataset.iterdir():
        (other / path.name).write_bytes(path.read_bytes() + (b" " if path.name == "manifest.json" else b""))
    results = run_ranks(2, cases, config, other, tmp_path / "elsewhere", folder=tmp_path, timeout=60)
    assert [r.value for r in results] == [[Exit.COMPLETE] + [Exit.NODES_DIFFER] * 6] * 2
    told = [line for line in results[0].stderr.splitlines() if line.startswith("preflight: ")]
    for fault in (
        "node1: .*GB are free, 4 checkpoints take",
        "node1: torch is 0.0, on the other nodes 2.13.0",
        "node1: its clock is",
        "node1: dataset manifest is",
        "node1: out: .*/elsewhere is not the folder that rank 0 writes to",
        "node1: .*33",
    ):
        assert any(re.match(f"preflight: {fault}", line) for line in told), (fault, told)
    assert "preflight: 2 nodes, nothing differs" in results[0].stdout
    assert list((tmp_path / "out").iterdir()) == []
