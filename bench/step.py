"""What flip, RandAugment and LogicMix add to a training step, and what else it does outside the model.

    python bench/step.py                                               # the default rows: bench/results/step.json
    python bench/step.py --model tf_efficientnet_lite0 --size 96 128 --weights FILE.safetensors
    python bench/step.py --model resnet101 --size 224 --rounds 3       # slow on a CPU

Times: see gpu_logicmix/train/stepbench.py; `gpu-logicmix bench` prints the same table. The last row is the small
network of `gpu-logicmix demo` in its setting: there LogicMix is the largest share of a step.

Operators and host syncs: the same step on the `meta` device, whose tensors have shapes but no values. The code takes
the way it takes on a GPU, and what would make the host wait for a value there raises here; a copy between devices that
the host would wait for is noticed too. Operators are what torch dispatches in one step with all augmentation, by the
part of the step; views compute nothing. (The optimiser is the one for lists of tensors. CUDA has a fused one, which
needs fewer.)
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from measure import RESULTS, environment, save_json
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_logicmix.cli.demo import SETTINGS
from gpu_logicmix.machine import keep_memory
from gpu_logicmix.progress import progress_bar
from gpu_logicmix.train import loop
from gpu_logicmix.train.config import Config
from gpu_logicmix.train.distributed import World, joined_world
from gpu_logicmix.train.stepbench import VARIANTS, measure_step, open_run, step_config, step_table

STEPS = 10  # between two logging points; all are alike
PARTS = ("labels and augmentation", "loss", "bookkeeping", "update", "model")


class Operators(TorchDispatchMode):
    """Counts what is dispatched under `part`, and notes the copies between devices for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.counts, self.views, self.copies = PARTS[0], Counter(), Counter(), []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        out = function(*arguments, **options)
        (self.views if function.is_view else self.counts)[self.part] += 1
        if function._overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            devices = {t.device.type for t in (*arguments[:2], out) if isinstance(t, torch.Tensor)}
            waits = not (options.get("non_blocking") or True in arguments[2:])
            if len(devices) > 1 and waits:
                self.copies.append(f"{function}: a copy between {' and '.join(sorted(devices))}")
        return out


@contextlib.contextmanager
def run_on_meta(config: Config):
    """A run without values, and a batch."""
    with mock.patch.object(loop, "autocast", return_value=contextlib.nullcontext()):  # it does not know the device
        run, batch = open_run(config, World(0, 1, torch.device("meta")))
        for group in run.optimizer.param_groups:
            group["foreach"] = True
        yield run, batch


def count_operators(config: Config) -> dict[str, dict[str, int]]:
    """Of one step, by the part of the step. The second step: the first one also makes the optimiser's memory."""
    with run_on_meta(config) as (run, batch):
        run.batch(*batch, update=True)
        with Operators() as operators:

            def enter(part: str) -> None:
                operators.part = part

            def leave_model(module, inputs, output):
                enter("loss")
                output.logits.register_hook(lambda grad: enter("model"))  # the loss's own backward pass is over

            run.net.register_forward_pre_hook(lambda *_: enter("model"))
            run.net.register_forward_hook(leave_model)
            add, update = run.sums.add, run._update
            run.sums.add = lambda *loss: (enter("bookkeeping"), add(*loss))[1]
            run._update = lambda: (enter("update"), update())[1]
            run.batch(*batch, update=True)
    return {part: {"operators": operators.counts[part], "views": operators.views[part]} for part in PARTS}


def host_syncs(config: Config, steps: int, augment: torch.nn.Module | None = None) -> list[str]:
    """What would make the host wait in so many steps; [] if nothing does.

    augment: in place of the run's own, to see that a sync is noticed.
    """
    found = []
    with run_on_meta(config) as (run, batch):
        run.augment = augment or run.augment
        for _ in range(steps):
            with Operators() as operators:
                try:
                    run.batch(*batch, update=True)
                except (NotImplementedError, RuntimeError) as error:
                    found.append(str(error).splitlines()[0])
            found += operators.copies
    return found


def demo_config() -> Config:
    """The setting of the demo, for one batch."""
    return Config(**SETTINGS | {"option": ["count=128"]})


def mix_share(result: dict) -> float:
    """LogicMix's share of a step, of CPU time: what the augmentation alone takes more with it than without."""
    bare, mixing = (result["variants"][name] for name in ("bare step", "+ LogicMix"))
    return (mixing["augmentation_cpu_ms"] - bare["augmentation_cpu_ms"]) / mixing["cpu_ms"]


def show_operators(counts: dict[str, dict[str, int]], syncs: list[str], console: Console) -> None:
    table = Table("part of the step", title="operators dispatched in one step", title_justify="left")
    for kind in ("operators", "views"):
        table.add_column(kind, justify="right")
    for part in PARTS[:-1]:
        table.add_row(part, *(f"{n:,}" for n in counts[part].values()))
    outside = (sum(counts[part][kind] for part in PARTS[:-1]) for kind in ("operators", "views"))
    table.add_row("outside the model", *(f"{n:,}" for n in outside), style="bold")
    table.add_row("the model, forward and backward", *(f"{n:,}" for n in counts["model"].values()))
    console.print(table)
    console.print(f"host syncs in {STEPS} steps between two logging points: {len(syncs)}")
    for line in sorted(set(syncs)):
        console.print(f"  {line}", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["tf_efficientnet_lite0"], help="of timm")
    parser.add_argument("--size", nargs="+", type=int, default=[96, 128], help="of the images, in pixels")
    parser.add_argument("--weights", default="none", help="file with weights of the model; they do not change the time")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each variant (default 7)")
    parser.add_argument("--note", default="", help="goes into the file: what else the machine was doing, for one")
    parser.add_argument("--out", type=Path, default=RESULTS / "step.json")
    options = parser.parse_args()
    console = Console()
    shared = {"weights": options.weights, "batch_size": options.batch_size}
    shared |= {"device": options.device, "threads": options.threads}
    configs = [step_config(model=m, size=s, **shared) for m in options.model for s in options.size]
    configs.append(replace(demo_config(), device=options.device))
    rows = []
    turns = len(configs) * len(VARIANTS) * (options.rounds + 1)
    with progress_bar(turns, "steps", unit=None, console=console) as advance:
        for config in configs:
            rows.append(measure_step(config, options.rounds, advance))
            console.print(step_table(rows[-1]))
    console.print(f"LogicMix's share of a step of the demo's network: {mix_share(rows[-1]):.1%} of its CPU time")
    counts = count_operators(configs[0])
    syncs = host_syncs(configs[0], STEPS)
    show_operators(counts, syncs, console)
    with joined_world(options.device, options.threads) as world:
        data = {"environment": environment(world.device), "note": options.note, "rows": rows}
    data["share of LogicMix in the demo's step"] = mix_share(rows[-1])
    data["operators"] = {"model": configs[0].model, **counts}
    data["host_syncs"] = {"steps": STEPS, "found": syncs}
    save_json(data, options.out)
    console.print(f"written: {options.out}")


if __name__ == "__main__":
    keep_memory()  # as the commands do
    main()
