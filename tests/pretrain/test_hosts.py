"""Several hosts for real, by the scripts of `pretrain/launch/`: pdsh, without ssh, torchrun.

A host's ranks are killed, a cable is cut and mended, and the run goes on with fewer hosts.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pretrain import checkpoint_store as store
from pretrain.exit_codes import Exit
from tests.support import hosts as support
from tests.support.hosts import Hosts
from tests.support.ranks import run_ranks
from tests.support.runs import CPU_CONFIG, metrics, run_main, small_tree, write_tree

BIN = Path(sys.executable).parent
PORT = "29541"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    why_not = support.obstacle()
    if why_not is not None:
        if os.environ.get("CI"):
            pytest.fail(f"CI must run this: {why_not}")
        pytest.skip(why_not)
    with Hosts(tmp_path / "hosts", 3) as found:
        yield found


def wait_until(condition: Callable[[], bool], seconds: float, log: Path) -> float:
    """Seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, log.read_text(errors="replace")[-4000:]
        time.sleep(0.05)
    return time.monotonic() - start


def last_step(out: Path) -> int:
    return int(metrics(out)[-1]["step"]) if (out / "metrics.jsonl").exists() and metrics(out) else 0


def newest_step(out: Path) -> int:
    return store.step_of(store.finished(out / "checkpoints")[0])


def environment(hosts: Hosts, **site: str) -> dict[str, str]:
    """What the user's shell would have, and the names that `pretrain/launch/site.sh` asks for."""
    return {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PDSH_SSH_ARGS_APPEND": f"-F {hosts.ssh_config}",
        "MASTER_ADDR": hosts.address("alpha"),
        "MASTER_PORT": PORT,
        "NETWORK_INTERFACE": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "DS_CONFIG": str(CPU_CONFIG),
        "DEEPSPEED_FLAGS": "--no_ssh_check",
        "GPUS_PER_NODE": "1",
        **site,
    }


def test_hosts_fail_and_the_run_goes_on_with_fewer(hosts: Hosts, dataset: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    tree: dict[str, Any] = small_tree(
        out, dataset, steps=100_000, global_batch_size=12, micro_batch_size=2, validate_every=0
    )
    tree["schedule"] = {"kind": "wsd", "warmup_steps": 2, "decay_steps": 1}  # the same LR whatever train.steps
    tree["checkpoint"] = {"every": 4}
    tree["recovery"] = {"collective_seconds": 6.0}
    config = write_tree(tmp_path / "run.yaml", tree)
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("alpha slots=1\nbeta slots=1\ngamma slots=1\n")
    shell = environment(hosts, HOSTFILE=str(hostfile), CONFIG=str(config), OUT=str(out))

    # Three hosts by pdsh, supervised. The ranks of one are killed, and all go on; then the user ends it.
    by_pdsh = hosts.popen("alpha", ["pretrain/launch/pdsh.sh"], log, env=shell)
    wait_until(lambda: last_step(out) >= 6, 600, log)
    assert "preflight: 3 nodes, nothing differs" in log.read_text()
    hosts.kill_ranks("gamma")
    took = wait_until(lambda: "supervise: start 1 ended: crash" in log.read_text(), 240, log)
    print(f"\nafter a host's ranks were killed, the launch was over in {took:.1f} s")
    wait_until(lambda: log.read_text().count("going on from") == 1 and log.read_text().count("saved") > 3, 360, log)
    hosts.run("alpha", "pkill", "-TERM", "-f", "pretrain.supervise")
    wait_until(lambda: by_pdsh.poll() is not None, 240, log)
    assert by_pdsh.returncode == Exit.STOPPED
    wait_until(lambda: not hosts.ranks(), 160, log)
    saved = store.finished(out / "checkpoints")[0]
    one_machine = tmp_path / "one_machine"
    overrides = [f"out={one_machine}", f"train.steps={last_step(out)}"]
    assert [r.value for r in run_ranks(3, run_main, config, *overrides, folder=tmp_path)] == [0, 0, 0]
    same = [line for line in metrics(one_machine) if line["step"] < last_step(out)]
    assert metrics(out)[: len(same)] == same

    # Two of them without ssh, from the last checkpoint, each supervised. A cable is cut and mended: they meet again.
    hostfile.write_text("alpha slots=1\nbeta slots=1\n")
    logs = {name: tmp_path / f"log_{name}" for name in ("alpha", "beta")}
    by_no_ssh = [
        hosts.popen(name, ["pretrain/launch/no_ssh.sh", str(rank), "recovery.collective_seconds=10"], log, env=shell)
        for rank, (name, log) in enumerate(logs.items())
    ]
    before = store.step_of(saved)
    wait_until(lambda: newest_step(out) > before + 4, 480, logs["alpha"])
    assert "preflight: 2 nodes, nothing differs" in logs["alpha"].read_text()
    assert f"going on from {saved} at step {before}" in logs["alpha"].read_text()
    hosts.link("beta", "down")
    ended = [
        wait_until(lambda log=log: "supervise: start 1 ended" in log.read_text(), 360, log)  # type: ignore[misc]
        for log in logs.values()
    ]
    print(f"after the cable was cut, both launches were over in {sum(ended):.1f} s; collective_seconds was 10")
    reached = newest_step(out)
    hosts.link("beta", "up")
    took = wait_until(lambda: newest_step(out) > reached, 800, logs["alpha"])
    print(f"after it was mended, the next checkpoint was there in {took:.1f} s")
    hosts.run("beta", "pkill", "-TERM", "-f", "pretrain.supervise")  # any supervisor stops the whole run
    wait_until(lambda: all(one.poll() is not None for one in by_no_ssh), 240, logs["beta"])
    assert [one.returncode for one in by_no_ssh] == [Exit.STOPPED] * 2
    assert hosts.ranks() == []

    # To the end by torchrun.
    resumed = newest_step(out)
    command = ["pretrain/launch/torchrun.sh", "alpha", "2", f"train.steps={resumed + 3}"]
    by_torchrun = [hosts.popen(name, command, log, env=shell) for name, log in logs.items()]
    wait_until(lambda: all(one.poll() is not None for one in by_torchrun), 480, logs["alpha"])
    assert [one.returncode for one in by_torchrun] == [0, 0], logs["alpha"].read_text() + logs["beta"].read_text()
    assert f"at step {resumed}" in logs["alpha"].read_text() + logs["beta"].read_text()
    assert [line["step"] for line in metrics(out)] == list(range(1, resumed + 4))
    assert (out / "DONE").exists()
