"""Whole tokenizations in their own processes: any number of them, killed, resumed, refused."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep.manifest import load_manifest
from data_prep.megatron import read_index
from data_prep.reader import open_split
from data_prep.tokenizer import load_tokenizer
from tests.support.corpora import ROOT, TIMEOUT, command, files_of, run, texts, write_corpus

SLOW_FILTER = """
import os, time
def keep(text, fields):
    if (log := os.environ.get("FILTER_LOG")):
        with open(log, "a") as file:
            file.write("x")
    time.sleep(float(os.environ.get("FILTER_SECONDS", "0")))
    return "reads its own" not in text
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "in")


@pytest.fixture(scope="module")
def slow_filter(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("filter") / "slow.py"
    path.write_text(SLOW_FILTER)
    return f"{path}:keep"


@pytest.fixture(scope="module")
def expected(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path, model_file: Path, slow_filter: str
) -> dict[str, bytes]:
    """The dataset as one undisturbed process with one worker makes it."""
    out = tmp_path_factory.mktemp("expected") / "out"
    done = run(command(corpus, model_file, out, "--filter", slow_filter, "--workers", 1))
    assert done.returncode == 0, done.stderr
    return files_of(out)


def test_documents_come_out_in_order_and_complete(
    expected: dict[str, bytes], tmp_path: Path, corpus: Path, model_file: Path
) -> None:
    for name, content in expected.items():
        (tmp_path / name).write_bytes(content)
    manifest = load_manifest(tmp_path)
    assert len(manifest.splits["train"].shards) > 3
    assert manifest.rejected == {
        "filtered": manifest.rejected["filtered"],
        "invalid_json": 1,
        "invalid_utf8": 1,
        "not_a_string": 1,
    }
    tokenizer = load_tokenizer(tmp_path)
    found: dict[str, list[str]] = {}
    for name in manifest.splits:
        split = open_split(tmp_path, name)
        ids = split.windows(np.array([0]), split.num_tokens)[0]
        ends = np.flatnonzero(ids == tokenizer.eos_id)
        assert ends[-1] == len(ids) - 1
        found[name] = [tokenizer.decode(part[:-1].tolist()) for part in np.split(ids, ends[:-1] + 1)]
        assert sum(len(text.encode()) for text in found[name]) == manifest.splits[name].text_bytes
        lengths = [read_index(tmp_path / f"{shard.prefix}.idx").lengths for shard in manifest.splits[name].shards]
        assert np.array_equal(np.cumsum(np.concatenate(lengths)), ends + 1)
    good = texts(300, 1)
    del good[20], good[10]
    plain = texts(30, 3)
    del plain[10]
    everything = [*good, *texts(300, 2), *texts(300, 2), *plain, *texts(300, 4), *texts(300, 5)]
    kept = [text for text in everything if "reads its own" not in text]
    validation = set(found["validation"])
    assert 0.01 < len(found["validation"]) / len(kept) < 0.12
    assert found["train"] == [text for text in kept if text not in validation]
    assert found["validation"] == [text for text in kept if text in validation]
    report = [json.loads(line) for line in expected["rejected.jsonl"].splitlines()]
    assert [(entry["file"], entry.get("line"), entry["reason"]) for entry in report] == [
        ("a.jsonl", 11, "invalid_json"),
        ("a.jsonl", 21, "not_a_string"),
        ("d010.txt", None, "invalid_utf8"),
    ]


# What a launcher tells process `rank` of three.
ENVIRONMENTS: dict[str, Callable[[int], dict[str, str]]] = {
    "by hand": lambda rank: {"RANK": str(rank), "WORLD_SIZE": "3"},
    # srun --nodes 2 --ntasks 3, as Slurm 22.05 sets it
    "srun": lambda rank: {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "SLURM_NTASKS": "3",
    },
}


@pytest.mark.parametrize("environment", sorted(ENVIRONMENTS))
def test_same_bytes_from_three_processes_with_two_workers(
    environment: str, tmp_path: Path, corpus: Path, model_file: Path, slow_filter: str, expected: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    line = command(corpus, model_file, out, "--filter", slow_filter, "--workers", 2)
    ranks = [
        subprocess.Popen(
            line, cwd=ROOT, env={**os.environ, **ENVIRONMENTS[environment](rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(3)
    ]
    for process in ranks:
        _, stderr = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, stderr
    assert files_of(out) == expected


LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29431", "-m"],
    "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "29432", "--module"],
}


@pytest.mark.parametrize("launcher", sorted(LAUNCHERS))
def test_same_bytes_under_a_launcher(
    launcher: str, tmp_path: Path, corpus: Path, model_file: Path, slow_filter: str, expected: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    python, _, *module = command(corpus, model_file, out, "--filter", slow_filter, "--workers", 1)
    done = run([python, *LAUNCHERS[launcher], *module])
    assert done.returncode == 0, done.stderr
    assert files_of(out) == expected


def test_killed_again_and_again_it_goes_on_and_ends_the_same(
    tmp_path: Path, corpus: Path, model_file: Path, slow_filter: str, expected: dict[str, bytes]
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    line = command(corpus, model_file, out, "--filter", slow_filter, "--workers", 2)
    slow = {**os.environ, "FILTER_SECONDS": "0.008", "FILTER_LOG": str(log)}
    total = 300 * 5 + 30 - 4
    for documents in (1, 250, 300):
        seen = size_of(log)
        process = subprocess.Popen(line, cwd=ROOT, env=slow, stderr=subprocess.DEVNULL)
        while size_of(log) < seen + documents:
            assert process.poll() is None, "ended before it could be killed"
            time.sleep(0.01)
        children = children_of(process.pid)
        assert len(children) >= 2
        process.kill()
        process.wait()
        assert not (out / "manifest.json").exists()
        assert_gone(children)
    seen = size_of(log)
    done = run(line, {"FILTER_LOG": str(log)})
    assert done.returncode == 0, done.stderr
    assert files_of(out) == expected
    # Not everything was read again: what the journal vouched for was kept.
    assert size_of(log) - seen < total - 100


def test_a_worker_that_dies_is_one_line_and_can_be_gone_on_from(
    tmp_path: Path, corpus: Path, model_file: Path, slow_filter: str, expected: dict[str, bytes]
) -> None:
    """As the kernel does when memory runs out."""
    out, log = tmp_path / "out", tmp_path / "log"
    line = command(corpus, model_file, out, "--filter", slow_filter, "--workers", 2)
    slow = {**os.environ, "FILTER_SECONDS": "0.01", "FILTER_LOG": str(log)}
    process = subprocess.Popen(line, cwd=ROOT, env=slow, stderr=subprocess.PIPE, text=True)
    while not size_of(log):
        time.sleep(0.01)
    workers = [pid for pid in children_of(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(workers[0], signal.SIGKILL)
    _, stderr = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 2
    errors = [text for text in stderr.splitlines() if text.startswith("error:")]
    assert errors == [
        "error: a worker process ended by itself (out of memory, or killed); run the same command again to go on"
    ]
    assert run(line).returncode == 0
    assert files_of(out) == expected


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def assert_gone(pids: list[int]) -> None:
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() and is_running(pid) for pid in pids):
        assert time.monotonic() < end, "worker processes outlived the main one"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_full_disk_is_one_line_and_can_be_gone_on_from(
    tmp_path: Path, corpus: Path, model_file: Path, slow_filter: str, expected: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    line = command(corpus, model_file, out, "--filter", slow_filter, "--workers", 1)
    limited = subprocess.run(
        line,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, 9_000)),
    )
    assert limited.returncode == 2
    errors = [text for text in limited.stderr.splitlines() if text.startswith("error:")]
    assert len(errors) == 1
    assert "File too large" in errors[0]
    assert not (out / "manifest.json").exists()
    done = run(line)
    assert done.returncode == 0, done.stderr
    assert files_of(out) == expected


def test_a_second_process_and_other_settings_are_refused(
    tmp_path: Path, corpus: Path, model_file: Path, slow_filter: str
) -> None:
    out = tmp_path / "out"
    line = command(corpus, model_file, out, "--filter", slow_filter, "--workers", 1)
    first = subprocess.Popen(line, cwd=ROOT, env={**os.environ, "FILTER_SECONDS": "1"}, stderr=subprocess.DEVNULL)
    try:
        while not (out / ".building/job.json").exists():
            time.sleep(0.02)
        second = run(line)
    finally:
        first.terminate()
        first.wait()
    assert second.returncode == 2
    assert "another tokenize process is at work" in second.stderr
    other = run(command(corpus, model_file, out, "--workers", 1))
    assert other.returncode == 2
    assert "holds an unfinished dataset with predicate" in other.stderr


def test_a_failing_rank_is_named_by_the_one_that_waits(tmp_path: Path, corpus: Path, model_file: Path) -> None:
    out = tmp_path / "out"
    bad = tmp_path / "bad.py"
    bad.write_text("import os\ndef keep(text, fields):\n    return 1 / (1 - int(os.environ['RANK']))\n")
    line = command(corpus, model_file, out, "--filter", f"{bad}:keep", "--workers", 1)
    ranks = [
        subprocess.Popen(
            line, cwd=ROOT, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=TIMEOUT)[1].splitlines()[-1] for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2]
    assert "ZeroDivisionError" in errors[1]
    assert "rank-00001 failed" in errors[0]


def test_strict_stops_at_the_first_fault(tmp_path: Path, corpus: Path, model_file: Path) -> None:
    done = run(command(corpus, model_file, tmp_path / "out", "--strict", "--workers", 1))
    assert done.returncode == 2
    assert "a.jsonl: invalid_json at" in done.stderr.splitlines()[-1]


def test_deduplication_and_bounds(tmp_path: Path, model_file: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    lines = texts(120, 1)
    repeated = [*lines, "short", *lines[:50], "new text that stays", *lines[60:], "new text that stays"]
    (source / "a.txt").write_text("\n".join(text.replace("\n", " ") for text in repeated))
    (source / "b.txt").write_text("\n".join(text.replace("\n", " ") for text in lines))
    out = tmp_path / "out"
    options = ["--text-unit", "line", "--deduplicate", "--min-chars", 10, "--validation-fraction", 0]
    line = command(source, model_file, out, *options)
    ranks = [
        subprocess.Popen([*line, "--workers", "1"], cwd=ROOT, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"})
        for rank in range(2)
    ]
    assert [process.wait(TIMEOUT) for process in ranks] == [0, 0]
    manifest = load_manifest(out)
    flat = [text.replace("\n", " ") for text in lines]
    unique = list(dict.fromkeys([*flat, "new text that stays"]))
    assert manifest.splits["train"].documents == len(unique)
    assert manifest.rejected["too_short"] == 1
    assert manifest.rejected["duplicate"] == len(repeated) - 1 + len(lines) - len(unique)
    split = open_split(out, "train")
    ids = split.windows(np.array([0]), split.num_tokens)[0]
    tokenizer = load_tokenizer(out)
    parts = np.split(ids, np.flatnonzero(ids == tokenizer.eos_id)[:-1] + 1)
    assert [tokenizer.decode(part[:-1].tolist()) for part in parts] == unique
    alone = tmp_path / "alone"
    assert run(command(source, model_file, alone, *options, "--workers", 2)).returncode == 0
    assert files_of(alone) == files_of(out)
