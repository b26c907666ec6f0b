"""A host whose network is gone: the others are told, while its process and its connections stay."""

import os
import re
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from autosched.runtime.ranks import watch
from autosched.runtime.ranks.heartbeat import acknowledged
from tests.runtime.ranks.processes import until
from tests.runtime.ranks.test_torchrun import FAILING, ROOT


@pytest.mark.skipif(sys.platform != "linux", reason="needs TCP_USER_TIMEOUT")
@pytest.mark.parametrize(("limit", "milliseconds"), [(None, 0), (1.0, 1000), (80.0, 10000)])
def test_connections_break_where_nothing_is_acknowledged(limit, milliseconds):
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = lambda: socket.create_connection(server.getsockname())  # noqa: E731
        with connect() as before:
            with acknowledged(limit):
                found = connect()
            with found, connect() as after:
                option = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
                each = [connection.getsockopt(*option) for connection in (before, found, after)]
    assert each == [0, milliseconds, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="needs TCP_USER_TIMEOUT")
def test_a_connection_breaks_that_has_the_descriptor_of_a_closed_one():
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = socket.create_connection(server.getsockname())
        number = before.fileno()
        with acknowledged(1.0):
            before.close()
            found = socket.create_connection(server.getsockname())
        with found:
            assert found.fileno() == number
            assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Read error [10.0.0.1]:4: Connection timed out. This is typical", "hangs"),
        ("Read error [10.0.0.1]:4: No route to host", "hangs"),
        ("Connection closed by peer [10.0.0.1]:4", "gone"),
    ],
)
def test_a_lost_host_is_told_from_a_killed_process(text, told):
    """The store may be on that host, and is not asked."""

    def receive(*_):
        raise RuntimeError(text)

    found = []
    group = SimpleNamespace(recv=receive)
    on_news = [
        lambda rank, name=name: found.append((name, rank))
        for name in ("failed", "gone", "left", "hangs")
    ]
    watching = watch.Watch(group, 0, 2, *on_news)
    watching.threads[0].join()
    assert found == [(told, 1)]


@pytest.fixture
def hosts():
    """Two network namespaces with addresses 10.99.9.1 and 10.99.9.2, joined by a bridge of a third."""
    names = [f"autosched-{os.getpid()}-{number}" for number in range(3)]
    run = lambda text: subprocess.run(text.split(), check=True, capture_output=True)  # noqa: E731
    try:
        for name in names:
            run(f"ip netns add {name}")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("network namespaces need `ip` and the rights to make them")
    try:
        *ends, middle = names
        run(f"ip -n {middle} link add bridge type bridge")
        run(f"ip -n {middle} link set bridge up")
        for number, name in enumerate(ends):
            run(f"ip -n {middle} link add to{number} type veth peer name eth0 netns {name}")
            run(f"ip -n {middle} link set to{number} master bridge up")
            run(f"ip -n {name} address add 10.99.9.{number + 1}/24 dev eth0")
            run(f"ip -n {name} link set eth0 up")
            run(f"ip -n {name} link set lo up")
        yield SimpleNamespace(
            names=ends, lose=lambda number: run(f"ip -n {middle} link set to{number} down")
        )
    finally:
        for name in names:
            run(f"ip netns delete {name}")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_host_is_named_by_the_others(hosts, tmp_path, victim):
    """Also that of rank 0, which has the store."""
    script = tmp_path / "failing.py"
    here = tmp_path / "here"
    lines = FAILING.format(how=f"open({str(here)!r}, 'w').close(); time.sleep(60)")
    script.write_text(
        re.sub("cpu:[01]", lambda found: f"cpu:{victim ^ (found[0] == 'cpu:0')}", lines)
    )
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "10.99.9.1", "MASTER_PORT": "29500"}
    names |= {"GLOO_SOCKET_IFNAME": "eth0", "TORCHELASTIC_RESTART_COUNT": "0"}
    names |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = []
    try:
        for rank, host in enumerate(hosts.names):
            command = f"hostname host{rank} && exec {sys.executable} {script}"
            inside = ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", command]
            environment = os.environ | names | {"RANK": str(rank)}
            ranks.append(
                subprocess.Popen(inside, env=environment, stderr=subprocess.PIPE, text=True)
            )
        until(lambda: here.exists() or any(each.poll() is not None for each in ranks))
        hosts.lose(victim)
        _, errors = ranks[1 - victim].communicate(timeout=9)  # processes are given up after 10 s
        assert f"RankError: rank {victim} (host host{victim}) hangs: its process was st" in errors
        assert f"rank {1 - victim} waited: receive second <- cpu:{victim}" in errors
        assert ranks[1 - victim].returncode == 1
        assert ranks[victim].poll() is None
    finally:
        for each in ranks:
            each.kill()
            each.communicate()
