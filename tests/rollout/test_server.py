"""Starting and stopping an engine. Most stories use a stand-in for SGLang: a small HTTP server with children of its own
that ignore SIGTERM and hide in sessions of their own. The live ones say so.
"""

import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from megatron_sao.config import EngineConfig
from megatron_sao.rollout import server as server_module
from megatron_sao.rollout import sglang_cpu
from megatron_sao.rollout.server import SGLangServer, _is_loopback, child_environment, launch_command, resolve_cores
from tests.conftest import LiveServer

KEY = "0123456789abcdef0123456789abcdef"

STAND_IN = """
import http.server, json, os, signal, subprocess, sys, time
sleeper = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.setsid(); time.sleep(600)"
children = [subprocess.Popen([sys.executable, "-c", sleeper]) for _ in range(2)]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("my key is", KEY, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
""".replace("KEY", repr(KEY))

LEAVES = """
import mmap, multiprocessing, os, socket, tempfile
file = tempfile.NamedTemporaryFile(delete=False)
bound = socket.socket(socket.AF_UNIX)
bound.bind(os.path.join(tempfile.mkdtemp(prefix="pymp-"), "listener-12345678"))
semaphore = multiprocessing.get_context("spawn").Semaphore()
def share(path, mode):
    with open(path, mode) as shared:
        shared.truncate(4096)
        return mmap.mmap(shared.fileno(), 4096)
loads = share(f"/dev/shm/sglang_loads_{os.getpid()}_test.shm", "w+b")
if os.environ.get("ALSO_MAPPED"):
    also = share(os.environ["ALSO_MAPPED"], "r+b")
"""

PARENT = """
import asyncio, sys, time
from pathlib import Path
from megatron_sao.config import EngineConfig
from megatron_sao.rollout import server
if {script!r}:
    server.launch_command = lambda config, *, port, **_: [sys.executable, "-c", {script!r}, str(port)]
config = EngineConfig(start_timeout_s=240, max_total_tokens=4096)
start = server.SGLangServer.start
asyncio.run(start(config, model_path={model!r}, dtype="float32", api_key={key!r}, log_path=Path({log!r})))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory of this process and its children; short, as sockets need it."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def _mapped_by(processes: list[psutil.Process]) -> list[Path]:
    maps = " ".join(Path(f"/proc/{process.pid}/maps").read_text() for process in processes)
    return [path for path in Path("/dev/shm").iterdir() if f" {path.stat().st_ino} " in maps]


def _use(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    def command(_config: EngineConfig, *, port: int, **_: Any) -> list[str]:
        return [sys.executable, "-c", script, str(port)]

    monkeypatch.setattr(server_module, "launch_command", command)


async def _start(model: Path, **fields: Any) -> SGLangServer:
    config = EngineConfig(**{"start_timeout_s": 60.0} | fields)
    return await SGLangServer.start(
        config, model_path=model, dtype="float32", api_key=KEY, log_path=model.parent / "log"
    )


def _tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def _all_gone(processes: list[psutil.Process], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(_runs(process) for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _supervisors(log: Path) -> list[psutil.Process]:
    return [process for process in psutil.Process().children() if str(log) in process.cmdline()]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_stop_ends_every_process_of_the_server_within_seconds(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    _use(monkeypatch, STAND_IN)
    server = await _start(model)
    processes = _tree(server._process.pid)
    assert len(processes) == 4
    assert server.alive()
    started = time.monotonic()
    await server.stop()
    assert time.monotonic() - started < 10
    assert not server.alive()
    assert _all_gone(processes, 0.1)
    await server.stop()


async def test_the_key_is_kept_out_of_the_log_and_of_argv(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(model.parent))
    monkeypatch.setattr(server_module.tempfile, "tempdir", str(model.parent))
    _use(monkeypatch, STAND_IN.replace(repr(KEY), "''.join(['01234567', '89abcdef'] * 2)"))
    server = await _start(model)
    try:
        assert "my key is ***" in server.tail()
        assert KEY not in server.log_path.read_text()
        assert not any(KEY in part for process in _tree(server._process.pid) for part in process.cmdline())
        assert not list(model.parent.glob("sao-engine-*"))
    finally:
        await server.stop()
    config, key_file = EngineConfig(), Path("/somewhere/key.yaml")
    command = launch_command(config, port=1, model_path=model, dtype="float32", key_file=key_file)
    assert command[command.index("--config") + 1] == str(key_file)
    assert "--api-key" not in command


@pytest.mark.parametrize("victim", ["parent", "supervisor"])
def test_nothing_survives_a_killed_parent_or_supervisor(model: Path, victim: str, temporary: Path) -> None:
    """No process; after the parent's death no file either."""
    script = LEAVES + STAND_IN if victim == "parent" else STAND_IN
    code = PARENT.format(script=script, model=str(model), key=KEY, log=str(model.parent / "log"))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        processes = _tree(parent.pid)[1:]
        assert len(processes) >= 4
        if victim == "parent":
            files = _mapped_by(processes)
            assert len(files) == 2
            assert list(temporary.glob("sao-*/*"))
            parent.kill()
            assert _all_gone(processes, 8)
            assert not [path for path in [*files, *temporary.iterdir()] if path.exists()]
        else:
            processes[0].kill()
            assert _all_gone(processes[:2], 8)  # SGLang's own children watch their parent themselves
    finally:
        parent.kill()
        parent.wait()
        for process in processes:
            if process.is_running():
                process.kill()


@pytest.mark.parametrize("end", ["stopped", "its own tree killed"])
async def test_a_server_leaves_no_file_and_takes_no_other_servers(
    monkeypatch: pytest.MonkeyPatch, model: Path, temporary: Path, end: str
) -> None:
    _use(monkeypatch, LEAVES + STAND_IN)
    others = [Path(f"/dev/shm/sglang_loads_{os.getpid()}_{what}.shm") for what in ("mapped", "idle")]
    monkeypatch.setenv("ALSO_MAPPED", str(others[0]))
    try:
        for path in others:
            path.write_bytes(bytes(4096))
        with others[0].open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            server = await _start(model)
            processes = _tree(server._process.pid)
            files = set(_mapped_by(processes)) - set(others)
            assert {path.name[:7] for path in files} == {"sglang_", "sem.mp-"}
            await asyncio.sleep(1.0)  # the supervisor looks four times a second
            if end != "stopped":
                for process in reversed(processes[1:]):  # at the end nobody is left whose maps could be read
                    process.kill()
                assert _all_gone(processes, 8)
            await server.stop()
        assert not [path for path in files if path.exists()]
        assert not os.listdir(temporary)
        assert all(path.exists() for path in others)
    finally:
        for path in others:
            path.unlink(missing_ok=True)


async def test_the_servers_temporary_directory_is_private_and_short_enough_for_sockets(
    monkeypatch: pytest.MonkeyPatch, model: Path, temporary: Path
) -> None:
    look = "import os, tempfile; d = tempfile.gettempdir(); print('files in', d, oct(os.stat(d).st_mode)[-3:])"
    _use(monkeypatch, look + STAND_IN)
    for parent in (temporary, temporary / ("long" * 20)):
        parent.mkdir(exist_ok=True)
        monkeypatch.setenv("TMPDIR", str(parent))
        server = await _start(model)
        await server.stop()
        _, _, path, mode = next(line for line in server.tail().splitlines() if "files in" in line).split()
        assert Path(path).parent == (temporary if parent is temporary else Path("/tmp"))
        assert mode == "700"
        assert len(f"{path}/pymp-12345678/listener-12345678") <= 107
        assert path.rpartition("/")[2] not in os.listdir(Path(path).parent)


async def test_children_that_a_dying_server_leaves_behind_are_ended(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    _use(monkeypatch, STAND_IN)
    server = await _start(model)
    processes = _tree(server._process.pid)
    processes[1].kill()
    assert _all_gone(processes, 8)
    assert not server.alive()


async def test_a_server_that_ends_shows_the_tail_of_its_log(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    _use(monkeypatch, "import sys\nfor i in range(100): print('line', i)\nprint('no such weights'); sys.exit(3)")
    with pytest.raises(RuntimeError, match="ended with status 3") as failed:
        await _start(model)
    lines = str(failed.value).splitlines()
    assert lines[-1] == "no such weights"
    assert lines[-29:-1] == [f"line {i}" for i in range(72, 100)]
    assert str(model.parent / "log") in str(failed.value)


async def test_a_server_that_never_answers_is_stopped_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    _use(monkeypatch, "import time; print('loading', flush=True); time.sleep(600)")
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="did not answer before its deadline.*\n.*loading"):
        await _start(model, start_timeout_s=1.5)
    assert time.monotonic() - started < 12
    assert not _supervisors(model.parent / "log")


async def test_a_cancelled_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    _use(monkeypatch, "import time; time.sleep(600)")
    task = asyncio.create_task(_start(model))
    await asyncio.sleep(1.0)
    assert _supervisors(model.parent / "log")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not _supervisors(model.parent / "log")


@pytest.mark.parametrize(
    "then", ["sys.exit(1)", "time.sleep(600)"], ids=["and it ends", "and it stays, as SGLang does"]
)
async def test_a_free_port_that_was_lost_is_replaced_by_another(
    monkeypatch: pytest.MonkeyPatch, model: Path, then: str
) -> None:
    ports = model.parent / "ports"
    said = "print('[Errno 98] address already in use', flush=True)"
    lost = f"import sys, time; open({str(ports)!r}, 'a').write(sys.argv[1] + '\\n')\n"
    lost += f"if len(open({str(ports)!r}).readlines()) < 3: {said}; {then}\n"
    _use(monkeypatch, lost + STAND_IN)
    server = await _start(model)
    await server.stop()
    used = ports.read_text().split()
    assert len(used) == 3
    assert server.url.endswith(f":{used[-1]}")


async def test_a_configured_port_that_is_taken_is_refused_before_the_start(model: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ValueError, match=rf"engine.port = {port} on 127.0.0.1 cannot be used.*engine.port = 0"):
            await _start(model, port=port)
    assert not (model.parent / "log").exists()


async def test_a_model_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model.path = .*nowhere' is not a model directory"):
        await _start(tmp_path / "nowhere")


def test_the_servers_environment_has_no_proxy_no_rank_and_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_cpu, "is_needed", lambda: True)
    parent = {"PATH": "/bin", "HTTPS_PROXY": "http://p", "http_proxy": "http://p", "RANK": "0", "PYTHONPATH": "/mine"}
    core = str(max(os.sched_getaffinity(0)))
    child = child_environment(parent, EngineConfig(cpu_cores="last"))
    assert child["PATH"] == "/bin"
    assert not {"HTTPS_PROXY", "http_proxy", "RANK"} & child.keys()
    assert (child["NO_PROXY"], child["HF_HUB_OFFLINE"], child["SGLANG_CPU_OMP_THREADS_BIND"]) == ("*", "1", core)
    assert child["OMP_NUM_THREADS"] == "1"
    assert child["PYTHONPATH"] == f"{sglang_cpu.STAND_INS}:/mine"


def test_where_cuda_is_nothing_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_cpu, "is_needed", lambda: False)
    child = child_environment({"PATH": "/bin"}, EngineConfig(cpu_cores="last"))
    assert not {"PYTHONPATH", "SGLANG_USE_CPU_ENGINE", "SGLANG_CPU_OMP_THREADS_BIND"} & child.keys()
    assert child["NVIDIA_TF32_OVERRIDE"] == "0"
    assert child_environment({"NVIDIA_TF32_OVERRIDE": "1"}, EngineConfig())["NVIDIA_TF32_OVERRIDE"] == "1"
    config = EngineConfig(tensor=2, extra_args=("--mem-fraction-static", "0.7"))
    command = launch_command(config, port=5, model_path="m", dtype="bfloat16", key_file=Path("k.yaml"))
    assert "--device" not in command
    assert command[-2:] == ["--mem-fraction-static", "0.7"]
    assert command[command.index("--tp") + 1] == "2"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_on_a_loopback_host_gloo_meets_there_too(host: str) -> None:
    parent = {"GLOO_SOCKET_IFNAME": "eth0"}
    assert child_environment(parent, EngineConfig(host=host))["GLOO_SOCKET_IFNAME"] == "lo"
    for other in ("10.0.0.5", "node7"):
        assert child_environment(parent, EngineConfig(host=other))["GLOO_SOCKET_IFNAME"] == "eth0"


@pytest.mark.parametrize(
    ("cores", "num_ranks", "resolved"),
    [
        (None, 1, None),
        ("last", 1, "9"),
        ("last", 2, "8|9"),
        ("4", 1, "4"),
        ("4-5,8", 1, "4-5,8"),
        ("4|8-9", 2, "4|8-9"),
    ],
)
def test_cores_are_those_that_this_process_may_use(cores: str | None, num_ranks: int, resolved: str | None) -> None:
    assert resolve_cores(cores, num_ranks=num_ranks, allowed={4, 5, 8, 9}) == resolved


@pytest.mark.parametrize(
    ("cores", "num_ranks", "message"),
    [
        ("1", 1, r"engine.cpu_cores = '1': this process may use cores \[4, 5\], not \[1\]; name others, or \"last\""),
        ("4-6", 1, r"not \[6\]"),
        ("4|7", 2, r"not \[7\]"),
        ("last", 3, r'"last" with tensor = 3: only cores \[4, 5\] are allowed'),
        ("first", 1, r'is not "last", and not like'),
        ("", 1, r'is not "last", and not like'),
    ],
)
def test_a_core_that_is_not_allowed_is_refused_before_the_start(cores: str, num_ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_cores(cores, num_ranks=num_ranks, allowed={4, 5})


def test_stand_ins_import_under_any_name_and_raise_when_called() -> None:
    code = (
        "from sgl_kernel import rmsnorm_cpu; from sgl_kernel.mamba import scan; import torchvision.transforms as T\n"
        "assert T.InterpolationMode.BICUBIC is T.InterpolationMode.BICUBIC\n"
        "try: rmsnorm_cpu(1)\nexcept NotImplementedError as error: print(error)"
    )
    environment = {**os.environ, "PYTHONPATH": str(sglang_cpu.STAND_INS)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert "sgl_kernel.rmsnorm_cpu was called" in result.stdout, result.stderr


@pytest.mark.live
async def test_a_live_server_keeps_its_key_binds_loopback_and_is_healthy_in_a_pause(live_server: LiveServer) -> None:
    server = live_server.server
    assert server.alive()
    log = server.log_path.read_text()
    assert "api_key" in log
    assert live_server.api_key not in log
    processes = _tree(server._process.pid)
    assert len(processes) >= 4
    assert not any(live_server.api_key in part for process in processes for part in process.cmdline())
    listening = [c.laddr for p in processes for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert int(server.url.rpartition(":")[2]) in {address.port for address in listening}
    open_to_all = [address for address in listening if not _is_loopback(address.ip)]
    assert len(open_to_all) <= 1, open_to_all  # torch's store between the server's own ranks
    assert {address.ip for address in open_to_all} <= {"::", "0.0.0.0"}
    headers = {"Authorization": f"Bearer {live_server.api_key}"}
    async with aiohttp.ClientSession(server.url, headers=headers, timeout=aiohttp.ClientTimeout(5)) as session:
        await session.post("/pause_generation", json={"mode": "retract"})
        async with session.get("/health") as health:
            assert health.status == 200
        await session.post("/continue_generation", json={})


@pytest.mark.live
def test_nothing_of_a_live_server_survives_a_killed_parent(
    live_server: LiveServer, tmp_path: Path, temporary: Path
) -> None:
    """Neither processes nor shared memory, nor temporary files."""
    code = PARENT.format(script="", model=str(live_server.model_path), key=KEY, log=str(tmp_path / "log"))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    processes = _tree(parent.pid)[1:]
    assert len(processes) >= 4
    files = _mapped_by(processes)
    assert any(path.name.startswith("sglang_loads_") for path in files)
    assert [path for path in temporary.glob("sao-*/*") if path.is_socket()]
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert _all_gone(processes, 10)
    assert not [path for path in files if path.exists()]
    assert not list(temporary.iterdir())
