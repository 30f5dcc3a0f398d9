"""Several hosts on one machine: network namespaces on a bridge, each with its own processes, name and sshd.

Needs root (or `unshare -Urnm`), iproute2, util-linux, openssh-server and pdsh. Nothing outside the namespaces is
changed but `/etc/netns/NAME`, which is removed at the end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMES = ("alpha", "beta", "gamma")
PROGRAMS = ("ip", "unshare", "nsenter", "sshd", "ssh", "ssh-keygen", "pdsh")
INSIDE = """
set -e
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/sshd
install -m 600 "$2/client.pub" /run/authorized_keys
exec "$(command -v sshd)" -D -e -f "$2/sshd_config"
"""
SSHD_CONFIG = """
HostKey {folder}/host
AuthorizedKeysFile /run/authorized_keys
PidFile /run/sshd.pid
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
"""
SSH_CONFIG = """
Host *
    IdentityFile {folder}/client
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking yes
    BatchMode yes
"""


def obstacle() -> str | None:
    """Why there can be no hosts here, or None."""
    os.environ["PATH"] = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: iproute2 openssh-server pdsh)"
    probe = subprocess.run(["unshare", "--net", "--pid", "--fork", "--mount", "true"], capture_output=True, text=True)
    return f"namespaces are not permitted: {probe.stderr.strip()}" if probe.returncode else None


class Hosts:
    """`alpha`, `beta`, ... at 10.77.0.1, 10.77.0.2, ... while it is entered as a context."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._prefix = f"dl{os.getpid()}"
        self.names = NAMES[:count]
        self.ssh_config = folder / "ssh_config"
        self._inits: dict[str, subprocess.Popen[bytes]] = {}
        self._pids: dict[str, int] = {}

    def address(self, name: str) -> str:
        return f"10.77.0.{self.names.index(name) + 1}"

    def __enter__(self) -> Hosts:
        self._folder.mkdir(parents=True)
        for key in ("host", "client"):
            _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._folder / key))
        host_key = (self._folder / "host.pub").read_text().split()[:2]
        known = [f"{name},{self.address(name)} {' '.join(host_key)}\n" for name in self.names]
        (self._folder / "known_hosts").write_text("".join(known))
        (self._folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=self._folder))
        self.ssh_config.write_text(SSH_CONFIG.format(folder=self._folder))
        switch = f"{self._prefix}s"
        try:
            _do("ip", "netns", "add", switch)
            _do("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
            _do("ip", "-n", switch, "link", "set", "br0", "up")
            for name in self.names:
                self._add(name, switch)
            for name in self.names:
                self._wait_for_sshd(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *unused: object) -> None:
        for name in self._inits:
            self._inits[name].kill()  # --kill-child: sshd, the namespace's init, and with it all that runs there
            self._inits[name].wait()
        for name in (*self.names, "s"):
            space = self._space(name) if name != "s" else f"{self._prefix}s"
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
            shutil.rmtree(f"/etc/netns/{space}", ignore_errors=True)

    def popen(self, name: str, command: list[str], log: Path, **options: Any) -> subprocess.Popen[bytes]:
        """Starts a command on a host, its output in `log`."""
        environment: Mapping[str, str] = options.pop("env", os.environ)
        with log.open("wb") as file:
            return subprocess.Popen(
                [*self._enter_command(name), *command], stdout=file, stderr=file, env=environment, **options
            )

    def run(self, name: str, *command: str) -> None:
        """Runs a short command on a host, which must succeed."""
        _do(*self._enter_command(name), *command)

    def link(self, name: str, state: str) -> None:
        """Sets a host's cable "down" or "up"."""
        _do("ip", "-n", f"{self._prefix}s", "link", "set", f"to_{name}", state)

    def kill_ranks(self, name: str) -> None:
        """SIGKILL to the ranks of a host."""
        self.run(name, "pkill", "-KILL", "-f", "pretrain/run.py --local_rank")

    def ranks(self) -> list[int]:
        """Process ids of run.py, on all hosts."""
        found = []
        for name in self.names:
            command = [*self._enter_command(name), "pgrep", "-f", "pretrain/run.py --local_rank"]
            found += subprocess.run(command, capture_output=True, text=True).stdout.split()
        return [int(pid) for pid in found]

    def _enter_command(self, name: str) -> list[str]:
        return ["nsenter", "--target", str(self._pids[name]), "--all", f"--wdns={Path.cwd()}", "--"]

    def _space(self, name: str) -> str:
        return f"{self._prefix}{name[0]}"

    def _add(self, name: str, switch: str) -> None:
        space = self._space(name)
        names = [f"{self.address(other)} {other}\n" for other in self.names]
        hosts = Path(f"/etc/netns/{space}/hosts")
        hosts.parent.mkdir(parents=True)
        hosts.write_text("127.0.0.1 localhost\n" + "".join(names))
        _do("ip", "netns", "add", space)
        _do("ip", "-n", switch, "link", "add", f"to_{name}", "type", "veth", "peer", "name", "eth0", "netns", space)
        _do("ip", "-n", switch, "link", "set", f"to_{name}", "master", "br0", "up")
        _do("ip", "-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        _do("ip", "-n", space, "link", "set", "eth0", "up")
        _do("ip", "-n", space, "link", "set", "lo", "up")
        inside = ["bash", "-c", INSIDE, "inside", name, str(self._folder)]
        apart = ["unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (self._folder / f"sshd_{name}.log").open("wb") as log:
            command = ["ip", "netns", "exec", space, *apart, *inside]
            self._inits[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def _wait_for_sshd(self, name: str) -> None:
        outer = self._inits[name].pid
        children = Path(f"/proc/{outer}/task/{outer}/children")
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            found = children.read_text().split()
            if found and Path(f"/proc/{found[0]}/comm").read_text().strip() == "sshd":
                self._pids[name] = int(found[0])
                listening = subprocess.run(
                    [*self._enter_command(name), "bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/22"], capture_output=True
                )
                if listening.returncode == 0:
                    return
            time.sleep(0.05)
        raise AssertionError(f"{name}: no sshd: {(self._folder / f'sshd_{name}.log').read_text()}")


def _do(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}: {result.stderr}"
