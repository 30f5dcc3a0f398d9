"""Run in a process of its own, without a hub: lm-evaluation-harness on the local tasks of a folder.

python -m tests.support.run_harness WORK: reads WORK/requests.json, writes WORK/answers.json. `commands` are lists of
arguments of our command, answered by exit statuses; `models` are arguments of the harness's own function, answered by
its results and the responses to each document.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

from pretrain.harness.__main__ import main


def evaluate(work: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Results and responses, by task."""
    tasks = TaskManager(include_path=str(work), include_defaults=False)  # the index of all others takes seconds
    found = lm_eval.simple_evaluate(**options, device="cpu", task_manager=tasks, log_samples=True, bootstrap_iters=0)
    samples = {
        task: [sample["resps"] for sample in sorted(lines, key=lambda line: line["doc_id"])]
        for task, lines in found["samples"].items()
    }
    return {"results": found["results"], "responses": samples, "rounds": found["config"].get("rounds")}


if __name__ == "__main__":
    work = Path(sys.argv[1])
    requests = json.loads((work / "requests.json").read_text())
    statuses = []
    for arguments in requests["commands"]:
        sys.argv = ["lm_eval", *arguments]
        statuses.append(main())
    models = {name: evaluate(work, options) for name, options in requests["models"].items()}
    (work / "answers.json").write_text(json.dumps({"statuses": statuses, "models": models}))
