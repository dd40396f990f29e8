"""model.py: heads, weights from files, freezing, parameter groups, normalisation; and real weights on real images."""

import copy
import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from gpu_logicmix import build_model, mean_average_precision
from gpu_logicmix.losses.base import Batch, Output
from gpu_logicmix.methods.base import Head

SMALL = "test_resnet"  # timm's own miniatures: half a million parameters
FAMILIES = {  # and the number of stages `freeze` sees in each
    "test_resnet": 5,
    "test_efficientnet": 6,
    "test_vit": 7,
    "test_convnext": 6,
    "mobilenetv3_small_050": 8,
    "regnetx_002": 5,
    "deit_tiny_distilled_patch16_224": 13,
}
BATCH_NORM = nn.modules.batchnorm._BatchNorm


def images(n=2, size=64, seed=0):
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


def timm_file(tmp_path, name=SMALL, classes=10, suffix=".safetensors", change=lambda state: state):
    """Weights of a timm model with a classifier, and where they are."""
    torch.manual_seed(1)
    model = timm.create_model(name, num_classes=classes)
    for module in model.modules():
        if isinstance(module, BATCH_NORM):  # statistics that would be missed
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.5, 2)
    state = change({k: v.contiguous() for k, v in model.state_dict().items()})
    path = tmp_path / f"weights{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    return model.eval(), path


# ------------------------------------------------------------------------------------------------ features and head
@pytest.mark.parametrize(
    ("name", "head"), [*((name, "linear") for name in FAMILIES), (SMALL, "mlp"), ("test_vit", "mlp")]
)
def test_features_head_embedding_and_classifier(name, head):
    model = build_model(name, 7, head, hidden=12 if head == "mlp" else None).eval()
    x = images(2, model.backbone.pretrained_cfg["input_size"][-1])
    with torch.no_grad():
        logits, features, embedding = model(x), model.features(x), model.embed(x)
        assert logits.shape == (2, 7)
        assert features.ndim == 2
        assert torch.equal(model.head(features).logits, logits)
        assert torch.equal(model.classifier(embedding), logits)
        assert model.classifier.weight.shape == (7, 12 if head == "mlp" else features.shape[1])
        weight, bias = model.classifier.weight, model.classifier.bias
        torch.testing.assert_close(embedding @ weight.T + bias, logits)


def test_the_mlp_head_is_as_wide_as_the_features_and_not_linear():
    torch.manual_seed(0)
    model = build_model(SMALL, 3, "mlp").eval()
    f = torch.randn(5, 96)
    assert model.head[0].weight.shape == (96, 96)

    def head(x):
        return model.head(x).logits

    with torch.no_grad():
        assert not torch.allclose(head(f) + head(-f), 2 * head(torch.zeros_like(f)), atol=1e-4)


def test_dropout_is_before_the_last_layer_and_off_in_eval():
    model = build_model(SMALL, 3, dropout=0.5)
    f = torch.ones(4, 96)
    assert not torch.equal(model.head(f).logits, model.head(f).logits)
    model.eval()
    assert torch.equal(model.head(f).logits, model.head(f).logits)
    assert isinstance(model.classifier, nn.Linear)


def test_set_classifier():
    model = build_model(SMALL, 3, "mlp", hidden=8).eval()
    weight, bias, layer = torch.randn(3, 8), torch.randn(3), model.classifier.weight
    model.set_classifier(weight, bias)
    assert model.classifier.weight is layer  # an optimiser goes on with it
    with torch.no_grad():
        torch.testing.assert_close(model(images()), model.embed(images()) @ weight.T + bias)
    with pytest.raises(ValueError, match=r"weight must be \[3, 8\], not \[4, 8\]"):
        model.set_classifier(torch.randn(4, 8), bias)


# ------------------------------------------------------------------------------------------------ heads on the map
class MapHead(Head):
    """Means of the map through a linear layer: the pooled head of a network that pools by the mean."""

    takes = "map"

    def __init__(self, features: int, categories: int, scale: float = 1.0) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(features, categories), scale

    def forward(self, features, batch=None):
        return Output(self.scale * self.layer(features.mean((2, 3))), {"map": features})


HERE = f"{__name__}:MapHead"
MAPS = {
    "test_resnet": (96, 3, 2),
    "test_efficientnet": (256, 3, 2),
    "test_convnext": (64, 3, 2),
    "test_vit": (64, 6, 4),
    "mobilenetv3_small_050": (288, 3, 2),
    "deit_tiny_distilled_patch16_224": (192, 6, 4),
    "swinv2_cr_tiny_ns_224": (768, 3, 2),
    "swin_s3_tiny_224": (768, 3, 2),
}


@pytest.mark.parametrize("name", MAPS)
def test_a_head_on_the_map_of_any_network(name):
    if name.startswith("swinv2_cr") and tuple(map(int, timm.__version__.split(".")[:3])) < (1, 0, 31):
        pytest.skip("timm before 1.0.31 cannot build this network for a map of 3 x 2 in windows of 2")
    size = {} if MAPS[name][1:] == (3, 2) and "swin" not in name else {"img_size": (96, 64)}
    if "swin" in name:
        size["window_size"] = 2
    model = build_model(name, 5, HERE, **size)
    x = torch.rand(2, 3, 96, 64)
    assert model.features(x).shape == (2, *MAPS[name])
    output = model(x, Batch(torch.zeros(2, 5)))
    assert output.extra["map"].shape == (2, *MAPS[name])
    assert model(x).shape == (2, 5)
    # A distributed run stops at a parameter that asks for a gradient and gets none.
    output.logits.sum().backward()
    assert [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    model.freeze(1).freeze(0)
    assert [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    assert model.classifier is None
    with pytest.raises(ValueError, match="MapHead has no last linear layer"):
        model.embed(x)
    with pytest.raises(ValueError, match="MapHead has no last linear layer"):
        model.set_classifier(torch.zeros(5, 3), torch.zeros(5))


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_the_map_is_what_the_network_pools_laid_out_as_the_image(name):
    torch.manual_seed(0)
    model = build_model(name, 5, HERE, **({"img_size": (96, 64)} if name == "test_vit" else {})).eval()
    x = torch.rand(1, 3, 96, 64)
    with torch.no_grad():
        before = model.features(x)
        if name == "test_resnet":
            torch.testing.assert_close(before.mean((2, 3)), model.backbone(x))
        else:
            tokens = model.backbone.forward_features(x)[:, 1:]  # row by row
            torch.testing.assert_close(before[0, :, 2, 3], tokens[0, 2 * 4 + 3])


def test_head_options_and_what_a_head_does_not_have():
    torch.manual_seed(0)
    one = build_model(SMALL, 5, HERE).eval()
    torch.manual_seed(0)
    two = build_model(SMALL, 5, HERE, head_options=["scale=2"]).eval()
    torch.testing.assert_close(2 * one(images()), two(images()))
    assert build_model(SMALL, 5, "mlp", head_options=["hidden=7"]).classifier.in_features == 7
    with pytest.raises(ValueError, match=r"dropout=0.5: head .*MapHead has no such option"):
        build_model(SMALL, 5, HERE, dropout=0.5)
    with pytest.raises(ValueError, match=r"head='liner': must be one of .* did you mean linear"):
        build_model(SMALL, 5, "liner")


def test_weights_of_a_head_without_a_last_linear_layer(tmp_path):
    first = build_model(SMALL, 4, HERE, normalisation="none").eval()
    path = tmp_path / "ours.safetensors"
    save_file(first.state_dict(), path)
    again = build_model(SMALL, 4, HERE, weights=path).eval()
    assert torch.equal(first(images()), again(images()))
    with pytest.raises(ValueError, match=r"do not fit test_resnet: 2 of another shape, first head.layer"):
        build_model(SMALL, 5, HERE, weights=path)
    _, path = timm_file(tmp_path)
    assert "the head starts from random weights" in build_model(SMALL, 4, HERE, weights=path).messages[0]


def test_image_size_of_networks_made_for_one():
    x = images(1, 96)
    assert build_model("test_vit", 3, image_size=96)(x).shape == (1, 3)
    assert build_model(SMALL, 3, image_size=96)(x).shape == (1, 3)


# ------------------------------------------------------------------------------------------------ normalisation
def test_normalisation():
    x = images(2, 32)
    torch.manual_seed(0)
    bare = build_model(SMALL, 3, normalisation="none").eval()
    torch.manual_seed(0)
    own = build_model(SMALL, 3, normalisation="backbone").eval()
    mean, std = (torch.tensor(own.backbone.pretrained_cfg[k])[:, None, None] for k in ("mean", "std"))
    assert mean.min() > 0
    with torch.no_grad():
        torch.testing.assert_close(own(x), bare((x - mean) / std))
        torch.testing.assert_close(bare(x), bare.head(bare.backbone(x)).logits)
        assert not torch.allclose(own(x), bare(x))


def test_auto_normalises_when_there_are_weights(tmp_path):
    assert not build_model(SMALL, 3).normalises
    reference, path = timm_file(tmp_path)
    model = build_model(SMALL, 10, weights=path)
    assert model.normalises
    assert model.mean.flatten().tolist() == pytest.approx(reference.pretrained_cfg["mean"])
    assert not build_model(SMALL, 10, weights=path, normalisation="none").normalises


def test_images_must_be_floats():
    with pytest.raises(ValueError, match=r"floating-point type with values in \[0, 1\], not torch.uint8"):
        build_model(SMALL, 3)(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


def test_types_and_memory_format(device):
    model = build_model(SMALL, 3, normalisation="backbone").to(device, torch.bfloat16).eval()
    x = images().to(device, torch.bfloat16, memory_format=torch.channels_last)
    seen = []
    model.backbone.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    assert model(x).dtype == torch.bfloat16
    assert seen[0].dtype == torch.bfloat16
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


# ------------------------------------------------------------------------------------------------ weights
@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("test_resnet", ".safetensors"),
        ("test_resnet", ".pth"),
        ("test_resnet", ".pt"),
        ("test_vit", ".safetensors"),
        ("test_convnext", ".safetensors"),  # "head" keeps a norm when its classifier goes
        ("deit_tiny_distilled_patch16_224", ".safetensors"),  # two classifiers
    ],
)
def test_weights_of_a_timm_model(tmp_path, name, suffix):
    reference, path = timm_file(tmp_path, name, suffix=suffix)
    model = build_model(name, 4, weights=path, normalisation="none").eval()
    x = images(2, reference.pretrained_cfg["input_size"][-1])
    with torch.no_grad():
        expected = reference.forward_head(reference.forward_features(x), pre_logits=True)
        torch.testing.assert_close(model.features(x), expected)
    assert len(model.messages) == 1
    assert "classifier for 10 categories is left out; ours for 4 starts from random weights" in model.messages[0]
    assert str(path) in model.messages[0]


def test_a_classifier_of_our_size_is_taken_over(tmp_path):
    reference, path = timm_file(tmp_path, classes=4)
    model = build_model(SMALL, 4, weights=path, normalisation="none").eval()
    assert model.messages == []
    with torch.no_grad():
        torch.testing.assert_close(model(images()), reference(images()))
    assert "left out" in build_model(SMALL, 4, "mlp", weights=path).messages[0]


def test_a_classifier_that_is_more_than_a_linear_layer_is_left_out(tmp_path):
    _, path = timm_file(tmp_path, "deit_tiny_distilled_patch16_224", classes=4)
    model = build_model("deit_tiny_distilled_patch16_224", 4, weights=path)
    assert "left out" in model.messages[0]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"state_dict": s, "epoch": 3},
        lambda s: {"state_dict": {k: v * 0 for k, v in s.items()}, "state_dict_ema": s},
        lambda s: {"model": {f"module.{k}": v for k, v in s.items()}},
        lambda s: {f"_orig_mod.{k}": v for k, v in s.items()},
        lambda s: {k: v for k, v in s.items() if not k.endswith("num_batches_tracked")},
    ],
    ids=["nested", "ema", "parallel", "compiled", "old"],
)
def test_checkpoints_of_training_runs(tmp_path, wrap):
    reference, path = timm_file(tmp_path, classes=4, suffix=".pth", change=wrap)
    with torch.no_grad():
        model = build_model(SMALL, 4, weights=path, normalisation="none").eval()
        torch.testing.assert_close(model(images()), reference(images()))


def test_weights_for_another_image_size(tmp_path):
    """Position embeddings are resampled, by timm."""
    reference, path = timm_file(tmp_path, "test_vit")
    model = build_model("test_vit", 10, weights=path, image_size=96)
    assert model.backbone.pos_embed.shape != reference.pos_embed.shape
    assert model(images(1, 96)).shape == (1, 10)
    assert torch.equal(model.backbone.blocks[0].attn.qkv.weight, reference.blocks[0].attn.qkv.weight)
    assert torch.equal(model.classifier.weight, reference.head.weight)


@pytest.mark.parametrize("normalisation", ["none", "backbone"])
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_of_our_own_model(tmp_path, normalisation, suffix):
    first = build_model(SMALL, 4, "mlp", normalisation=normalisation).eval()
    path = tmp_path / f"run{suffix}"
    save_file(first.state_dict(), path) if suffix == ".safetensors" else torch.save({"model": first.state_dict()}, path)
    again = build_model(SMALL, 4, "mlp", weights=path).eval()
    assert again.normalises == (normalisation == "backbone")  # as it was trained
    with torch.no_grad():
        assert torch.equal(again(images()), first(images()))
        other = build_model(SMALL, 6, "mlp", weights=path).eval()
        assert torch.equal(other.embed(images()), first.embed(images()))
    assert "classifier for 4 categories is left out" in other.messages[0]
    with pytest.raises(ValueError, match=r"do not fit test_resnet: .*head"):
        build_model(SMALL, 4, "linear", weights=path)


def test_weights_that_do_not_fit(tmp_path):
    _, path = timm_file(tmp_path, "test_efficientnet")
    with pytest.raises(ValueError, match="do not fit test_resnet") as error:
        build_model(SMALL, 4, weights=path)
    message = str(error.value)
    assert str(path) in message
    assert "missing, first conv1.0.weight" in message
    assert "unknown to the model, first" in message
    assert "\n" not in message
    assert len(message) < 500


def test_weights_of_another_shape_or_with_a_hole(tmp_path):
    wider = torch.zeros(9, 3, 3, 3)
    _, path = timm_file(tmp_path, change=lambda s: s | {"conv1.0.weight": wider})
    with pytest.raises(ValueError, match=r"1 of another shape, first conv1.0.weight \(\[9, 3, 3, 3\], not "):
        build_model(SMALL, 4, weights=path)
    _, path = timm_file(tmp_path, change=lambda s: {k: v for k, v in s.items() if k != "layer1.0.conv1.weight"})
    with pytest.raises(ValueError, match=r"1 missing, first layer1.0.conv1.weight$"):
        build_model(SMALL, 4, weights=path)


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def test_weights_that_cannot_be_read(tmp_path, capsys):
    missing = tmp_path / "nowhere.pth"
    with pytest.raises(ValueError, match=r"nowhere.pth': no such file"):
        build_model(SMALL, 4, weights=missing)
    for suffix, content in ((".safetensors", b"abc"), (".pth", b"abc"), (".pt", b""), (".pth", b"PK\x03\x04" * 9)):
        path = tmp_path / f"broken{suffix}"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"broken{suffix}' cannot be read: "):
            build_model(SMALL, 4, weights=path)
    (tmp_path / "weights.npz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"must be a .safetensors, .pth or .pt file"):
        build_model(SMALL, 4, weights=tmp_path / "weights.npz")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="holds no state dict"):
        build_model(SMALL, 4, weights=tmp_path / "list.pth")
    torch.save({"state_dict": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(ValueError, match=r"evil.pth' cannot be read"):
        build_model(SMALL, 4, weights=tmp_path / "evil.pth")
    assert "executed" not in capsys.readouterr().out


def test_pretrained_weights_that_cannot_be_had(monkeypatch):
    def no_network(*args, **options):
        assert options["pretrained"]
        raise OSError("could not reach the hub\nand much more")

    monkeypatch.setattr(timm, "create_model", no_network)
    with pytest.raises(
        ValueError, match=r"'resnet18' with pretrained=True: could not reach the hub \(.*resnet18.tv_in1k"
    ):
        build_model("resnet18", 3, pretrained=True)


def test_pretrained_weights_go_with_the_backbones_normalisation(monkeypatch):
    create = timm.create_model
    asked = []

    def instead_of_the_hub(name, pretrained, **options):
        asked.append(pretrained)
        return create(name, **options)

    monkeypatch.setattr(timm, "create_model", instead_of_the_hub)
    assert build_model(SMALL, 3, pretrained=True).normalises
    assert asked == [True]


# ------------------------------------------------------------------------------------------------ freezing
@pytest.mark.parametrize(("name", "stages"), FAMILIES.items())
def test_stages_hold_every_parameter_once(name, stages):
    model = build_model(name, 3)
    names = [n for stage in model.stages() for n in stage]
    assert model.num_stages == stages
    assert sorted(names) == sorted(n for n, _ in model.backbone.named_parameters())


def test_freeze_stem_and_first_stage():
    model = build_model(SMALL, 3).freeze(2)
    for name, parameter in model.named_parameters():
        frozen = name.startswith(("backbone.conv1", "backbone.bn1", "backbone.layer1"))
        assert parameter.requires_grad != frozen, name
    assert model.freeze(0).freeze(0) is model
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("n", [0, 2, 5, -1])
def test_what_is_frozen_does_not_move_and_the_rest_does(n):
    torch.manual_seed(0)
    model = build_model(SMALL, 3, freeze=n)
    model.eval()
    model.train()
    before = copy.deepcopy(model.state_dict())
    optimiser = torch.optim.AdamW(model.param_groups(0.1, weight_decay=0.1))
    for seed in range(2):
        model(images(4, 64, seed)).square().mean().backward()
        optimiser.step()
    frozen = {f"backbone.{name}" for stage in model.stages()[: None if n == -1 else n] for name in stage}
    for key, value in model.state_dict().items():
        if key in ("mean", "std"):
            continue
        layer, _, last = key.rpartition(".")
        statistic = last.startswith(("running_", "num_batches"))
        still = (f"{layer}.weight" if statistic else key) in frozen
        assert torch.equal(value, before[key]) == still, key
    for name, module in model.backbone.named_modules():
        if isinstance(module, BATCH_NORM):
            assert module.training == (f"backbone.{name}.weight" not in frozen), name


def test_freezing_survives_a_copy_and_synchronised_batch_norms():
    model = build_model(SMALL, 3, freeze=1)
    for twin in (copy.deepcopy(model), nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))):
        twin.train()
        assert not twin.backbone.bn1.training
        assert twin.backbone.layer1[0].bn1.training
    model.freeze(0)
    assert model.backbone.bn1.training


def test_a_wholly_frozen_backbone_is_a_function_of_the_image():
    model = build_model("test_vit", 3, freeze=-1, drop_path_rate=0.5, proj_drop_rate=0.5).train()
    x = images(2, 160)
    assert torch.equal(model.features(x), model.features(x))
    assert not model.features(x).requires_grad
    assert model(x).requires_grad
    model.freeze(0)
    assert not torch.equal(model.features(x), model.features(x))


# ------------------------------------------------------------------------------------------------ parameter groups
@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext"])
def test_param_groups(name):
    model = build_model(name, 3, "mlp", freeze=1)
    groups = model.param_groups(0.1, 0.01, 0.5)
    where = {id(p): group for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(where)
    kinds = (nn.LayerNorm, BATCH_NORM, nn.GroupNorm)
    norms = {id(p) for m in model.modules() if isinstance(m, kinds) for p in m.parameters(recurse=False)}
    for key, p in model.named_parameters():
        if not p.requires_grad:
            assert id(p) not in where
            continue
        group = where[id(p)]
        assert group["lr"] == (0.1 if key.startswith("head") else 0.01)
        matrix = key.endswith("weight") and p.ndim > 1 and id(p) not in norms
        assert group["weight_decay"] == (0.5 if matrix else 0.0), key
    assert [g["name"] for g in groups] == ["backbone", "backbone (no decay)", "head", "head (no decay)"]


def test_param_groups_of_position_embeddings_and_of_a_frozen_backbone():
    model = build_model("test_vit", 3)
    decayed = {id(p) for g in model.param_groups(0.1, weight_decay=0.5) if g["weight_decay"] for p in g["params"]}
    assert id(model.backbone.pos_embed) not in decayed
    assert {g["lr"] for g in model.param_groups(0.1)} == {0.1}
    assert [g["name"] for g in model.freeze(-1).param_groups(0.1, 0.01)] == ["head", "head (no decay)"]


# ------------------------------------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "resnet_101"}, "model='resnet_101': timm has no such model; near are .*resnet101"),
        ({"name": "efficientnet_lit0"}, "near are .*efficientnet_lite0"),
        ({"name": "§§§"}, "model='§§§': timm has no such model$"),
        ({"head": "transformer"}, "head='transformer': must be one of "),
        ({"normalisation": "imagenet"}, "normalisation='imagenet': must be one of auto, none, backbone"),
        ({"num_classes": 0}, "num_classes=0: must be 1 or more"),
        ({"head": "mlp", "hidden": 0}, "hidden=0: must be 1 or more"),
        ({"freeze": 6}, "freeze=6: must be 0 to 5, the stages of ResNet, or -1 for all"),
        ({"freeze": -2}, "freeze=-2"),
        ({"weights": "a.pth", "pretrained": True}, "choose one"),
        ({"image_scale": 3}, "model='test_resnet': .*image_scale"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        build_model(**{"name": SMALL, "num_classes": 3} | options)


# ------------------------------------------------------------------------------------------------ compile
@pytest.mark.filterwarnings("ignore")
def test_compiles_without_a_graph_break():
    torch._dynamo.reset()
    model = build_model(SMALL, 3, "mlp", normalisation="backbone").eval()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(images()), model(images()))


# ------------------------------------------------------------------------------------------------ real weights
# Categories that COCO and ImageNet share, and their index among the 1000 of ImageNet.
SHARED_CATEGORIES = {
    **{"bear": 294, "zebra": 340, "elephant": 386, "airplane": 404, "train": 466, "keyboard": 508, "laptop": 620},
    **{"microwave": 651, "bus": 779, "toilet": 861, "umbrella": 879, "vase": 883, "traffic light": 920},
    **{"broccoli": 937, "banana": 954, "pizza": 963},
}


def test_real_weights_see_what_is_in_real_images(shared):
    """The file's own classifier, taken over whole, finds the categories of COCO it knows from ImageNet."""
    weights = shared / "weights" / "tf_efficientnet_lite0.safetensors"
    folder = shared / "data" / "coco-mini"
    if not weights.is_file() or not folder.is_dir():
        pytest.skip(f"no {weights} or no {folder}")
    table = json.loads((folder / "annotations" / "instances_val2014.json").read_text())
    names = {category["id"]: category["name"] for category in table["categories"]}
    shown = {image["id"]: set() for image in table["images"]}
    for note in table["annotations"]:
        shown[note["image_id"]].add(names[note["category_id"]])
    files = {image["id"]: folder / "val2014" / image["file_name"] for image in table["images"]}
    chosen = set(list(files)[:40])
    for category in SHARED_CATEGORIES:
        chosen |= set([i for i in files if category in shown[i]][:6])
    chosen = sorted(chosen)
    batch = torch.stack([torch.from_numpy(np.array(Image.open(files[i]).convert("RGB"))) for i in chosen])
    batch = batch.permute(0, 3, 1, 2).float() / 255
    targets = torch.tensor([[category in shown[i] for category in SHARED_CATEGORIES] for i in chosen])

    model = build_model("tf_efficientnet_lite0", 1000, weights=weights).eval()
    assert model.messages == []
    assert model.mean.flatten().tolist() == model.std.flatten().tolist() == [0.5, 0.5, 0.5]
    with torch.no_grad():
        features = model.features(batch)
        logits = model.head(features).logits[:, list(SHARED_CATEGORIES.values())]
    chance = targets.double().mean().item()
    value = mean_average_precision(logits, targets)
    print(f"mAP {value:.3f} on {len(chosen)} images, chance {chance:.3f}")
    assert chance < 0.1
    assert value > 0.55

    # The same backbone under a head of our own, as a training run starts.
    ours = build_model("tf_efficientnet_lite0", 80, "mlp", weights=weights).eval()
    assert ours.messages == [
        f"{weights}: its classifier for 1000 categories is left out; ours for 80 starts from random weights"
    ]
    with torch.no_grad():
        torch.testing.assert_close(ours.features(batch[:4]), features[:4])


def test_batch_norm_eval_keeps_statistics_but_trains_scales():
    torch.manual_seed(0)
    images = torch.rand(4, 3, 32, 32)
    kept = build_model("test_resnet", 3, batch_norm="eval")
    moved = build_model("test_resnet", 3)
    moved.load_state_dict(kept.state_dict())
    before = {name: value.clone() for name, value in kept.named_buffers()}
    for model in (kept, moved):
        model.eval()
        model.train()(images).sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in kept.named_buffers())
    assert not all(torch.equal(value, before[name]) for name, value in moved.named_buffers())
    norms = [m for m in kept.backbone.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert norms
    assert all(m.weight.grad is not None for m in norms)
    with pytest.raises(ValueError, match="batch_norm='frozen': must be train or eval"):
        build_model("test_resnet", 3, batch_norm="frozen")
