"""Commands that compare runs: demo, study."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gpu_logicmix.cli import screen
from gpu_logicmix.cli.options import Device, Seed, Threads, given
from gpu_logicmix.errors import printable


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the two runs and the page. An earlier demo in it is replaced.")
    ] = Path("demo"),
    seed: Seed = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few images and steps: only to see that everything works.")
    ] = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Plain training against LogicMix where the former overfits, on drawn shapes.

    Two runs side by side, half of the labels known; three to seven minutes on two cores, no GPU. Images of shapes are
    drawn on the fly, there is nothing to download. Prints a table, writes a page.

        gpu-logicmix demo --seed 1 --out demo-1
    """
    from gpu_logicmix.cli.demo import run_demo
    from gpu_logicmix.train.signals import Interrupted

    try:
        run_demo(out, quick=quick, console=screen.console, seed=seed, device=device, threads=threads)
    except (KeyboardInterrupt, Interrupted):
        screen.say("stopped; the same command starts the demo again", "yellow")
        raise typer.Exit(130) from None


def study(
    file: Annotated[
        Path, typer.Argument(metavar="STUDY.toml", help="The runs; see studies/ and docs/study.md.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for runs and results; studies/results/NAME unless given.")
    ] = None,
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Do only part I (from 0) of N: one part per machine.")
    ] = "0/1",
    on: Annotated[
        Literal["here", "ray"], typer.Option(help="ray: every run a task of a Ray cluster (RAY_ADDRESS).")
    ] = "here",
    cpus: Annotated[
        float | None, typer.Option(min=0, help="With --on ray: CPUs of a run; its --threads unless given.")
    ] = None,
    gpus: Annotated[
        float | None, typer.Option(min=0, help="With --on ray: GPUs of a run; 1 unless given, if there are any.")
    ] = None,
    only_report: Annotated[
        bool, typer.Option("--only-report", help="Do not train: tables and plots of the finished runs.")
    ] = False,
    show_plan: Annotated[bool, typer.Option("--plan", help="List the runs and which are finished.")] = False,
    images_per_second: Annotated[float | None, typer.Option(help="With --plan: print the hours at this speed.")] = None,
    data: Annotated[str | None, typer.Option(help="DATA instead of that in the file.")] = None,
    weights: Annotated[str | None, typer.Option(help="Initial weights instead of those in the file.")] = None,
    cache: Annotated[str | None, typer.Option(help="Folder for decoded images instead of that in the file.")] = None,
    device: Annotated[str | None, typer.Option(help="Device instead of that in the file.")] = None,
    threads: Threads = None,
) -> None:
    """Do the runs of a study, and compare them in tables and plots.

    Can be stopped at any time: the same command keeps finished runs and resumes the others.

        gpu-logicmix study studies/coco-mini.toml --shard 0/2

        gpu-logicmix study studies/paper-mixes.toml --on ray --cpus 8
    """
    from gpu_logicmix.study import plan as studies

    planned = studies.read_study(file, **given(data=data, weights=weights, cache=cache, device=device, threads=threads))
    out = out or Path("studies") / "results" / file.stem
    # To list or to report what is there, the data need not be here.
    train = not (show_plan or only_report)
    studies.check_same_start(
        planned, out, lambda text: screen.say(printable(text), "yellow"), data=train or data is not None
    )
    if show_plan:
        studies.print_plan(planned, out, screen.console, images_per_second)
        return
    failed = [] if only_report else _run(planned, out, _shard(shard), on, cpus, gpus)
    rows = studies.collect(planned, out)
    screen.say(f"{len({row.run for row in rows})} of {len({plan.folder for plan in planned})} runs are finished")
    if rows:
        screen.say("\n".join(map(printable, (out / "results.md").read_text(encoding="utf-8").splitlines())))
        screen.say(f"wrote {printable(out / 'index.html')}, results.csv, results.md and plots")
    if failed:
        raise ValueError(f"{len(failed)} runs failed; the first: {failed[0]}")


def _run(
    planned: Sequence[Any], out: Path, shard: tuple[int, int], on: str, cpus: float | None, gpus: float | None
) -> list[str]:
    """Here, or on a cluster. Returns a line for each run that failed."""
    from gpu_logicmix.study.on_ray import run_on_ray
    from gpu_logicmix.study.plan import run_study
    from gpu_logicmix.train.signals import Interrupted

    if on == "here" and (cpus is not None or gpus is not None):
        raise ValueError("--cpus and --gpus belong to --on ray")
    if on == "ray" and shard != (0, 1):
        raise ValueError("--shard: not with --on ray, which spreads the runs itself")
    try:
        if on == "ray":
            return run_on_ray(planned, out, cpus=cpus, gpus=gpus, console=screen.console)
        return run_study(planned, out, shard=shard, console=screen.console)
    except Interrupted as stopped:
        screen.say(f"stopped; the same command continues ({printable(stopped)})", "yellow")
        raise typer.Exit(130 if stopped.signum == signal.SIGINT else 0) from None
    except KeyboardInterrupt:
        screen.say("stopped; the same command continues", "yellow")
        raise typer.Exit(130) from None


def _shard(text: str) -> tuple[int, int]:
    part, _, whole = text.partition("/")
    if not (part.isdecimal() and whole.isdecimal() and int(part) < int(whole)):
        raise ValueError(f"--shard {text}: write I/N with I from 0 to N - 1, as 0/2")
    return int(part), int(whole)
