"""The command that lets a model leave: export."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gpu_logicmix.cli import screen
from gpu_logicmix.cli.options import RunFolder
from gpu_logicmix.cli.runs import Use
from gpu_logicmix.errors import printable


def export(
    run: RunFolder,
    to: Annotated[Literal["onnx", "torch-export", "timm", "hf"], typer.Option(help="Format.")] = "onnx",
    out: Annotated[
        Path | None, typer.Option(help="File, or folder with --to hf; in RUN/export unless given.", show_default=False)
    ] = None,
    use: Use = None,
    license: Annotated[str, typer.Option(help="Licence of the weights, for the model card.")] = "other",
) -> None:
    """Export the model of a finished run, and check the result against it.

    onnx and torch-export: the whole model, from images in [0, 1] to logits and probabilities, any batch size;
    preprocessing, category names and thresholds are in the metadata. timm: a checkpoint for timm.create_model. hf: a
    folder for the Hugging Face hub, with config.json and a model card. The last two need a run with --head linear.

        gpu-logicmix export runs/photos --to onnx --out photos.onnx
    """
    from gpu_logicmix.decisions import OtherWeights, read_decisions
    from gpu_logicmix.models.export import FORMATS, Card, export_model
    from gpu_logicmix.train.predict import load_run

    config, model, categories, file = load_run(run, use, device="cpu")
    with screen.warnings_as_lines(OtherWeights):
        decisions = read_decisions(run, file.stem)
    if decisions is not None and decisions.names != categories:
        decisions = None
    card = Card(categories, config.size, config.model, decisions, _about(run, config, file.stem), license)
    with screen.console.status("exporting …"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters, about themselves
        exported = export_model(model, to, out or run / "export" / FORMATS[to], card)
    screen.say(f"wrote {printable(exported.path)}: {config.model}, {len(categories)} categories, {file.name}")
    screen.say(f"checked against the model: logits differ by at most {exported.difference:.2g}")
    if decisions is None:
        screen.say("without thresholds of its own: gpu-logicmix decide RUN fits them")
    screen.say(f"load it: {printable(exported.load)}")


def _about(run: Path, config: Any, weights: str) -> dict[str, str]:
    """The rows of the model card."""
    from gpu_logicmix.train.runlog import read_log

    lines = read_log(run)
    start = next((line for line in lines if line["kind"] == "start"), {})
    end = next((line for line in reversed(lines) if line["kind"] == "end"), {})
    mAP = end.get("mAP_cft" if weights == "cft" else "mAP")
    known = "as labeled" if config.known is None else f"{config.known:g} ({config.protocol})"
    # The place of the data on this machine is nobody's business.
    about = {
        "data": config.data.partition(":")[0],
        "known labels": known,
        "method": f"{config.mix}, loss {config.loss}",
    }
    about |= {"curriculum labeling": "yes" if config.cl else "no", "weights": weights, "seed": str(config.seed)}
    if isinstance(mAP, float):
        about["mAP on validation"] = f"{mAP:.2%}"
    if isinstance(start.get("versions"), dict):
        about["versions"] = ", ".join(f"{name} {value}" for name, value in start["versions"].items())
    return about
