"""Exported models, loaded by the libraries they are for, against the model itself."""

import json

import pytest
import timm
import torch
from safetensors.torch import load_file

from gpu_logicmix.decisions import fit_decisions
from gpu_logicmix.errors import RunError
from gpu_logicmix.models import export
from gpu_logicmix.models.classifier import build_model
from gpu_logicmix.models.export import Card, export_model

NAMES = ["cat", "dog | cow", "`bird`", "été"]


def model_of(name="test_resnet", head="linear", size=64, **options):
    torch.manual_seed(0)
    model = build_model(name, 4, head=head, normalisation="backbone", image_size=size, **options).eval()
    with torch.no_grad():
        model.classifier.weight.mul_(20)  # logits that differ
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_()
    return model


def card_of(size=64, name="test_resnet", **options):
    return Card(NAMES, size, name, **options)


def decisions():
    logits = torch.randn(100, 4)
    return fit_decisions(logits, (logits + torch.randn(100, 4) > 0).long(), NAMES)


def images_of(count=3, size=64):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
def test_onnx_in_onnxruntime(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, found = model_of(head="mlp"), decisions()
    exported = export_model(model, "onnx", tmp_path / "a" / "model.onnx", card_of(decisions=found))
    assert list((tmp_path / "a").iterdir()) == [exported.path]  # one file
    session = onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])
    for count in (1, 2, 7):  # the batch is dynamic
        images = images_of(count)
        with torch.no_grad():
            wanted = model(images)
        logits, probabilities = session.run(None, {"images": images.numpy()})
        assert logits == pytest.approx(wanted.numpy(), abs=1e-4)
        assert probabilities == pytest.approx((wanted / found.temperature + found.shift).sigmoid().numpy(), abs=1e-5)
    assert 0 <= exported.difference < 1e-3
    assert wanted.std() > 0.1
    about = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
    assert about["categories"] == NAMES
    assert about["input"]["size"] == [64, 64]
    assert about["input"]["mean"] == pytest.approx(model.mean.flatten().tolist())
    assert about["thresholds"] == pytest.approx(found.thresholds.tolist())
    assert (about["temperature"], about["shift"]) == (found.temperature, found.shift)


def test_torch_export(tmp_path):
    model = model_of(head="mlp")
    exported = export_model(model, "torch-export", tmp_path / "model.pt2", card_of())
    files = {"metadata.json": ""}
    program = torch.export.load(exported.path, extra_files=files).module()
    assert json.loads(files["metadata.json"])["categories"] == NAMES
    for count in (1, 5):
        images = images_of(count)
        with torch.no_grad():
            torch.testing.assert_close(program(images), (model(images), model(images).sigmoid()))


@pytest.mark.parametrize(("name", "size"), [("test_resnet", 64), ("test_convnext", 64), ("test_vit", 96)])
def test_timm_checkpoint(tmp_path, name, size):
    model = model_of(name, size=size)
    exported = export_model(model, "timm", tmp_path / "out.safetensors", card_of(size, name))
    about = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    loaded = timm.create_model(name, checkpoint_path=str(exported.path), num_classes=4, **about["model_args"]).eval()
    assert set(loaded.state_dict()) == set(load_file(exported.path))
    assert exported.path.stat().st_mode == exported.path.with_suffix(".json").stat().st_mode
    images = images_of(size=size)
    with torch.no_grad():
        torch.testing.assert_close(loaded((images - model.mean) / model.std), model(images))
    assert about["categories"] == NAMES
    again = eval(exported.load, {"timm": timm}).eval()
    with torch.no_grad():
        assert torch.equal(again(images), loaded(images))


@pytest.mark.parametrize(("name", "size"), [("test_resnet", 64), ("test_vit", 96)])
def test_hugging_face_folder(tmp_path, name, size):
    model, found = model_of(name, size=size), decisions()
    about = {"data": "csv", "known labels": "0.1 (uniform)", "mAP on validation": "81.00%"}
    card = card_of(size, name, decisions=found, about=about, license="apache-2.0")
    exported = export_model(model, "hf", tmp_path / "hf", card)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'hf'}", pretrained=True).eval()
    config = timm.data.resolve_model_data_config(loaded)
    assert tuple(config["input_size"]) == (3, size, size)
    assert config["crop_mode"] == "squash"
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
    images = images_of(size=size)
    with torch.no_grad():
        torch.testing.assert_close(loaded((images - mean) / std), model(images))
    assert eval(exported.load, {"timm": timm}).num_classes == 4
    assert loaded.pretrained_cfg["label_names"] == NAMES
    written = json.loads((tmp_path / "hf" / "config.json").read_text(encoding="utf-8"))
    assert written["thresholds"] == pytest.approx(found.thresholds.tolist())
    text = (tmp_path / "hf" / "README.md").read_text(encoding="utf-8")
    assert 'license: "apache-2.0"' in text
    assert "| known labels | `0.1 (uniform)` |" in text
    assert "`dog / cow`" in text  # a name cannot break the table
    assert (tmp_path / "hf" / "decisions.json").exists()


@pytest.mark.parametrize("to", ["torch-export", "timm", "hf"])
def test_the_model_stays_as_it_was(tmp_path, to):
    """In training, with gradients, on its device: it may be exported between two epochs."""
    model = model_of(freeze=1).train()
    before = {name: (p, p.requires_grad) for name, p in model.named_parameters()}
    assert {grad for _, grad in before.values()} == {True, False}
    modes = [module.training for module in model.modules()]
    export_model(model, to, tmp_path / export.FORMATS[to], card_of())
    assert [module.training for module in model.modules()] == modes
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert parameter.requires_grad == before[name][1]


@pytest.mark.parametrize("to", ["torch-export", "timm", "hf"])
@pytest.mark.parametrize(("name", "channels"), [("test_resnet", 1), ("test_vit", 4)])
def test_images_of_other_channels(tmp_path, to, name, channels):
    model = model_of(name, size=96, in_chans=channels)
    exported = export_model(model, to, tmp_path / export.FORMATS[to], card_of(96, name))
    images = torch.rand(2, channels, 96, 96)
    loaded = eval(exported.load, {"timm": timm, "torch": torch})
    with torch.no_grad():
        got = loaded(images)[0] if to == "torch-export" else loaded.eval()((images - model.mean) / model.std)
        torch.testing.assert_close(got, model(images))


def test_heads_that_timm_has_no_place_for(tmp_path):
    for to in ("timm", "hf"):
        with pytest.raises(RunError, match="export to onnx or torch-export, or train with --head linear"):
            export_model(model_of(head="mlp"), to, tmp_path / export.FORMATS[to], card_of())
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_gives_other_logits_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(
        export, "_read_timm", lambda path, card: lambda images: images.mean((2, 3))[:, :1].expand(-1, 4)
    )
    with pytest.raises(RunError, match="gives other logits than the model itself"):
        export_model(model_of(), "timm", tmp_path / "out.safetensors", card_of())


@pytest.mark.parametrize("to", ["timm", "hf", pytest.param("torch-export", marks=pytest.mark.slow)])
def test_an_export_that_fails_leaves_the_earlier_one(tmp_path, monkeypatch, to):
    path = tmp_path / export.FORMATS[to]
    export_model(model_of(), to, path, card_of())
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    other = model_of(name="test_resnet")
    with torch.no_grad():
        other.classifier.weight.mul_(2)
    with monkeypatch.context() as patch:
        patch.setattr(export, "_difference", lambda *_: (_ for _ in ()).throw(RunError("other logits")))
        with pytest.raises(RunError, match="other logits"):
            export_model(other, to, path, card_of())
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    with monkeypatch.context() as patch:
        full = OSError(28, "No space left on device")
        patch.setattr(export.os, "replace", lambda *_: (_ for _ in ()).throw(full))
        with pytest.raises(RunError, match=rf"{path.name}: cannot be written \(No space left on device\)"):
            export_model(other, to, path, card_of())
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    export_model(other, to, path, card_of())
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} != before


def test_a_run_is_not_written_over(tmp_path):
    for name in ("log.jsonl", "model.safetensors"):
        (tmp_path / name).write_text("a run")
    with pytest.raises(ValueError, match="is the folder of a run; choose another"):
        export_model(model_of(), "hf", tmp_path, card_of())
    with pytest.raises(ValueError, match=r"model.safetensors: is a file of the run in"):
        export_model(model_of(), "timm", tmp_path / "model.safetensors", card_of())
    export_model(model_of(), "hf", tmp_path / "export" / "hf", card_of())
    assert (tmp_path / "model.safetensors").read_text() == "a run"


def test_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match="to='tflite': must be one of onnx"):
        export_model(model_of(), "tflite", tmp_path / "x", card_of())
    with pytest.raises(ValueError, match="is a folder"):
        export_model(model_of(), "onnx", tmp_path, card_of())
    with pytest.raises(ValueError, match=r"must end in .safetensors"):
        export_model(model_of(), "timm", tmp_path / "out.pth", card_of())


def test_without_onnx(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(RunError, match=r"pip install onnx onnxruntime onnxscript"):
        export_model(model_of(), "onnx", tmp_path / "model.onnx", card_of())


@pytest.mark.parametrize(
    "name", ["last.pt", "best.pt", "cft.safetensors", "decisions.safetensors", "model.safetensors"]
)
def test_an_export_is_no_file_of_a_run(tmp_path, name):
    """timm's format writes a .json beside: cft.json and decisions.json are the run's, too."""
    (tmp_path / "log.jsonl").touch()
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"is a file of the run in"):
        export._check_no_run(tmp_path / name)
    export._check_no_run(tmp_path / "timm.safetensors")
    export._check_no_run(tmp_path / "cft.onnx")
