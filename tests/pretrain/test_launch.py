"""run.py under the deepspeed launcher, as a user starts it: by path, with a tokenizer, down to the text sample."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.datasets import write_text_dataset
from tests.support.ranks import free_port
from tests.support.runs import CPU_CONFIG, REPOSITORY, metrics, small_tree, write_tree


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    port = ["--master_port", str(free_port())]  # the default is that of any other run on this machine
    return subprocess.run(
        [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "2", *port, "pretrain/run.py", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=1200,
    )


def test_launched_run_and_launched_mistake(tmp_path: Path) -> None:
    vocab_size = write_text_dataset(tmp_path / "data").vocab_size
    tree = small_tree(tmp_path / "out", tmp_path / "data", steps=3)
    tree["monitor"] = {"log_every": 1, "sample_tokens": 5, "sample_prompt": "def "}
    config = write_tree(tmp_path / "run.yaml", tree)
    arguments = ["--ds_config", str(CPU_CONFIG), "--config", str(config)]
    done = launch(*arguments, "optimizer.lr=6e-3")
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"vocabulary {vocab_size}, context 16" in done.stdout
    assert "step 3/3  loss " in done.stdout
    assert "sample of 5 tokens:\ndef " in done.stdout
    assert f"tensorboard --logdir {tmp_path / 'out' / 'tensorboard'}" in done.stdout
    assert [line["step"] for line in metrics(tmp_path / "out") if "loss" in line] == [1, 2, 3]

    mistaken = launch(*arguments, "train.micro_batch_size=3")
    assert mistaken.returncode != 0
    # The launcher ends the other ranks when one leaves, so either may have been the one that could tell.
    expected = "8 is not a multiple of train.micro_batch_size 3 x 2 ranks = 6; 6 would be"
    assert re.search(rf"^error \(rank [01]\): .*{re.escape(expected)}$", mistaken.stderr, re.MULTILINE)
    assert "Traceback" not in mistaken.stderr
