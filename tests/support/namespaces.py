"""Hosts of their own on this machine: Linux namespaces behind a bridge, with a program in place of ssh.

Each host has its own network address, process ids, host name, /dev/shm and /tmp. Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import os
import secrets
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_SECONDS = 30.0
# In the new host: its own files in memory, but the folder that all hosts share, which may lie below /tmp.
_INSIDE = """
set -e
mkdir -p {folder}/{name}/tmp
mount -t tmpfs tmpfs {folder}/{name}/tmp
for shared in {shared}; do
  mkdir -p {folder}/{name}/tmp/$shared
  mount --bind $shared {folder}/{name}/tmp/$shared
done
mkdir -p {folder}/{name}/tmp/tmp
mount --rbind {folder}/{name}/tmp/tmp /tmp
mount -t tmpfs tmpfs /dev/shm
mount -t proc proc /proc
hostname {name}
ip link set lo up
touch {folder}/{name}/made
exec sleep infinity
"""
# In place of ssh: one host can't enter another, so what stands outside of all is asked to run the line of shell.
_SSH = """#!{python} -IS
import socket, sys
with socket.socket(socket.AF_UNIX) as gate:
    gate.connect("{gate}")
    socket.send_fds(gate, ["\\0".join(sys.argv[1:]).encode()], [0, 1, 2])
    sys.exit(int(gate.recv(16)))
"""


@dataclass(frozen=True)
class Hosts:
    """Hosts by their addresses; `ssh` is the program to be used in place of ssh."""

    folder: Path
    addresses: tuple[str, ...]
    ssh: Path

    def init_pid(self, address: str) -> int:
        """The host's first process, seen from outside; the host ends with it."""
        return int((self.folder / f"pid-{address}").read_text())

    def line(self, address: str, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on the host."""
        return ["nsenter", "-t", str(self.init_pid(address)), "-n", "-p", "-m", "-u", *command]

    def kill(self, address: str) -> None:
        """End every process of the host at once, as a power cut does."""
        os.kill(self.init_pid(address), 9)

    def processes(self, address: str) -> list[str]:
        """Command lines of what runs on the host, besides its first process."""
        init = self.init_pid(address)
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.pid != init and _process_space(process.pid) == _process_space(init):
                    found.append(" ".join(process.cmdline()))
        return found


def _process_space(pid: int) -> Path:
    return Path(f"/proc/{pid}/ns/pid").readlink()


def can_make_hosts() -> bool:
    """True where this user may make network namespaces."""
    name = f"di-try-{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


class _Gate(socketserver.ThreadingUnixStreamServer):
    """Runs lines of shell on the hosts; the end that asks lends its stdin, stdout and stderr."""

    daemon_threads = True

    def __init__(self, hosts: Hosts, path: Path, environment: Mapping[str, str]) -> None:
        super().__init__(str(path), _GateRequest)
        self.hosts = hosts
        self.environment = environment


class _GateRequest(socketserver.BaseRequestHandler):
    server: _Gate

    def handle(self) -> None:
        message, files, _, _ = socket.recv_fds(self.request, 1 << 20, 3)
        address, *words = message.decode().split("\0")
        stdin, stdout, stderr = files
        try:
            line = self.server.hosts.line(address, ["sh", "-c", " ".join(words)])
            done = subprocess.run(
                line, stdin=stdin, stdout=stdout, stderr=stderr, env=self.server.environment, check=False
            )
        finally:
            for file in files:
                os.close(file)
        with suppress(BrokenPipeError):  # who asked was killed
            self.request.sendall(str(done.returncode & 0xFF).encode())


@contextmanager
def make_hosts(
    num_hosts: int, folder: Path, *, shared: Sequence[Path], environment: Mapping[str, str]
) -> Iterator[Hosts]:
    """Hosts that live while the block runs; they see the folders `shared` below /tmp, and all that is not below it.

    `environment` is that of what runs on them over ssh.
    """
    bridge = f"di{secrets.token_hex(3)}"  # never one that is still being taken away
    network = f"10.117.{os.getpid() % 250}"
    addresses = tuple(f"{network}.{number + 1}" for number in range(num_hosts))
    ssh = folder / "ssh"
    ssh.write_text(_SSH.format(python=sys.executable, gate=folder / "gate"))
    ssh.chmod(0o700)
    hosts = Hosts(folder, addresses, ssh)
    _ip("link", "add", bridge, "type", "bridge")
    processes = []
    try:
        _ip("link", "set", bridge, "up")
        for number, address in enumerate(addresses):
            processes.append(_make_host(folder, f"host-{number}", shared))
            [init] = psutil.Process(processes[-1].pid).children()
            (folder / f"pid-{address}").write_text(str(init.pid))
            outside = f"{bridge}v{number}"
            _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", str(init.pid))
            _ip("link", "set", outside, "master", bridge, "up")
            inside = ["nsenter", "-t", str(init.pid), "-n", "ip"]
            subprocess.run([*inside, "address", "add", f"{address}/24", "dev", "eth0"], check=True)
            subprocess.run([*inside, "link", "set", "eth0", "up"], check=True)
        with _Gate(hosts, folder / "gate", environment) as gate:
            threading.Thread(target=gate.serve_forever, daemon=True).start()
            try:
                yield hosts
            finally:
                gate.shutdown()
    finally:
        for process in processes:
            process.kill()  # and with it, by --kill-child, the host
            process.wait()
        _ip("link", "del", bridge)


def _make_host(folder: Path, name: str, shared: Sequence[Path]) -> subprocess.Popen[bytes]:
    script = _INSIDE.format(folder=folder, name=name, shared=" ".join(str(path) for path in shared))
    spaces = ["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "--kill-child=SIGKILL"]
    process = subprocess.Popen([*spaces, "sh", "-c", script])
    deadline = time.monotonic() + _SECONDS
    while not (folder / name / "made").exists():
        assert process.poll() is None, f"{name} could not be made"
        assert time.monotonic() < deadline, f"{name} was not made in {_SECONDS:g} s"
        time.sleep(0.02)
    return process


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
