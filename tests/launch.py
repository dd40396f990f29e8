"""Commands as a user types them, each in a process of its own that can be killed.

A server imports the package once and forks for each command: it is there in a moment, not after ten seconds of imports.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from multiprocessing import forkserver
from pathlib import Path

from remembered import remember

remember(40)  # of processes that are forked, each would draw them again
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["launch", "gpu_logicmix.cli.fit", "gpu_logicmix.train.loop", "gpu_logicmix.report.preview"]
)

# A run that takes seconds, and has everything in it that is random or keeps a state.
_SMALL = """
    fit shapes -o count=40 --size 32 --known 0.5 --model test_resnet --weights none --head linear
    --head-option dropout=0.1
    --batch-size 8 --accumulate 2 --epochs 3 --theta-pos 0.2 --theta-neg -0.2 --cft-epochs 5 --log-every 1
    --workers 0 --threads 1
"""
# One without chance, and without batch norm, which would see another batch on each rank.
_PLAIN = """
    fit shapes -o count=40 --size 32 --known 0.5 --model test_vit --weights none --head linear --mix none
    --no-flip --no-randaugment --batch-size 8 --epochs 2 --no-cft --log-every 5 --workers 0 --threads 1
"""

SMALL, PLAIN = _SMALL.split(), _PLAIN.split()


def serve() -> None:
    """Start the server, if there is none yet. It finds this file only by PYTHONPATH before Python 3.12.4."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [before])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _main(arguments: list[str], output: str, environment: dict[str, str], limit: int | None, hook) -> None:
    os.setsid()  # Ctrl-C goes to a group of processes: one that the tests are not in
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(environment)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored, and so would this process
    if limit is not None:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    multiprocessing.set_start_method("fork", force=True)  # for workers, as it is in a process that a shell starts
    sys.argv = ["gpu-logicmix", *arguments]
    from gpu_logicmix import cli
    from gpu_logicmix.cli import runs, screen

    screen.console = screen.make_console(width=200)
    runs.write_report = lambda folder: None  # it has tests of its own, and takes longer than the run
    if hook is not None:
        hook[0](*hook[1:])
    try:
        cli.main()
    except Exception:
        traceback.print_exc()
        sys.exit(1)


class Command:
    """`gpu-logicmix ARGUMENTS`, started.

    limit: bytes that a file may grow to; more is an error, as on a full disk.
    hook: a function and its arguments, called in the process before the command.
    """

    count = 0

    def __init__(self, folder: Path, *arguments, limit: int | None = None, hook=None, **environment) -> None:
        Command.count += 1
        self.output = Path(folder) / f"output-{Command.count}"
        environment = {"COLUMNS": "200", "GPU_LOGICMIX_DEBUG": "", **environment}
        values = (list(map(str, arguments)), str(self.output), {k: str(v) for k, v in environment.items()}, limit, hook)
        serve()
        self.process = CONTEXT.Process(target=_main, args=values)
        self.process.start()

    def wait(self, timeout: float = 300) -> int:
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"still running after {timeout} s:\n{self.text}"
        return self.process.exitcode

    def signal(self, signum: int, group: bool = False) -> None:
        (os.killpg if group else os.kill)(self.process.pid, signum)

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_) -> None:
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()

    @property
    def out(self) -> str:
        return self._read("out")

    @property
    def err(self) -> str:
        return self._read("err")

    @property
    def text(self) -> str:
        return self.out + self.err

    def _read(self, name: str) -> str:
        file = self.output.with_suffix(f".{name}")
        return file.read_text() if file.exists() else ""


def run(folder: Path, *arguments, **options) -> Command:
    """A command, when it is over."""
    with Command(folder, *arguments, **options) as command:
        command.wait()
    return command


def good(folder: Path, *arguments, **options) -> Command:
    command = run(folder, *arguments, **options)
    assert command.process.exitcode == 0, command.text
    return command


def _free_port() -> int:
    """A port that no other process of the tests picks meanwhile, and that the system gives to nobody of itself."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    first = 20_000 + 500 * (worker % 24)
    for port in range(first + os.getpid() % 250, first + 500):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no port of {first} to {first + 499} is free")


def ranks(folder: Path, world: int, *arguments, **options) -> list[Command]:
    """The same command as torchrun starts it, once for each rank."""
    port = _free_port()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world, **options}
    commands = [Command(folder, *arguments, RANK=rank, LOCAL_RANK=rank, **place) for rank in range(world)]
    for command in commands:
        with command:
            command.wait()
    return commands


def until(true, seconds: float = 120, what: str = "", every: float = 0.005) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(every)
