"""The progress line in a pseudo-terminal, by itself and in a real run."""

from __future__ import annotations

import sys
from pathlib import Path

from pretrain.monitor.progress_line import ProgressLine
from tests.support.runs import CPU_CONFIG, REPOSITORY, small_tree, write_tree
from tests.support.terminal import run_in_terminal, screen

SCRIPT = """
import logging, subprocess, sys, time, warnings
OTHER = "import sys, warnings; sys.path.insert(0, {repository!r}); "
OTHER += "from pretrain.monitor.progress_line import ProgressLine; "
OTHER += "line = ProgressLine(2, 6, wanted=False); line.say('never'); warnings.warn('of another'); print('rank 1')"
sys.path.insert(0, {repository!r})
from pretrain.monitor.progress_line import ProgressLine
logger = logging.getLogger("DeepSpeed")
logger.addHandler(logging.StreamHandler(sys.stdout))
logger.propagate = False
line = ProgressLine(2, 6, wanted=True)
assert line.live
for step in (3, 4, 5, 4, 5, 6):
    time.sleep(0.12)
    line.show(step, f"step {{step}}/6  loss {{1 / step:.4f}}")
    if step == 3:
        subprocess.run([sys.executable, "-c", OTHER], check=True)
    if step == 4:
        line.say("saved something")
        print("printed")
        warnings.warn("warned")
        logger.warning("logged")
        sys.stderr.write("written\\n")
line.close()
print("after")
"""


def test_everything_else_stands_above_the_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(repository=str(REPOSITORY)))
    exit_code, written = run_in_terminal([sys.executable, str(script)], folder=tmp_path)
    assert exit_code == 0, written
    *above, bar, after, end = screen(written)
    assert (after, end) == ("after", "")
    assert bar == "step 6/6  loss 0.1667 |████████████████████| 100 %"
    above = [line for line in above if "warnings.warn(" not in line]
    assert [line.split(": ")[-1] for line in above[:2]] == ["of another", "rank 1"]
    above = above[2:]
    said = ["saved something", "printed", "warned", "logged", "written"]  # Python tells a warning once
    assert [line.split(": ")[-1] for line in above] == [*said, *(word for word in said if word != "warned")]
    assert "step 5/6  loss 0.2000 |" in written


def test_real_run_in_a_terminal(dataset: Path, tmp_path: Path) -> None:
    """One line that moves with every step; validation and checkpoints above it, the summary below."""
    config = write_tree(tmp_path / "run.yaml", small_tree(tmp_path / "out", dataset, steps=12, validate_every=5))
    command = [sys.executable, "pretrain/run.py", "--ds_config", str(CPU_CONFIG), "--config", str(config)]
    exit_code, written = run_in_terminal(command, folder=REPOSITORY)
    assert exit_code == 0, written
    lines = screen(written)
    places = {
        start: [number for number, line in enumerate(lines) if line.startswith(start)]
        for start in (
            "K = 2 blocks",
            "step  5/12  validation loss",
            "saved ",
            "step 12/12  loss",
            "12 steps, ",
            "done: ",
        )
    }
    assert [len(found) for found in places.values()] == [1, 1, 2, 1, 1, 1], written
    (bar,) = places["step 12/12  loss"]
    assert lines[bar].endswith("| 100 %")
    assert max(places["saved "]) < bar < places["12 steps, "][0] < places["done: "][0]
    drawn = {part.split()[1] for part in written.split("\r") if part.startswith("step") and "|" in part}
    assert len(drawn) > 3  # steps that a person could see, of which some are too quick


def test_no_terminal_means_plain_lines(tmp_path: Path) -> None:
    line = ProgressLine(0, 10, wanted=True)
    assert not line.live  # pytest's captured output is no terminal
    line.show(1, "unseen")
    line.close()
