"""methods/pu_mlc.py: the consistency term by hand, lambda's distribution, and the local-global convolution as loops."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gpu_logicmix import PartialBCELoss, VariationalPULoss
from gpu_logicmix.losses import Batch, Output
from gpu_logicmix.methods import HEADS
from gpu_logicmix.methods.pu_mlc import GlobalBranch, LocalGlobalConv2d, _beta, add_local_global
from gpu_logicmix.models.classifier import build_model

TARGETS = torch.tensor([[1, 0, -1], [-1, -1, -1], [0, 1, 1], [1, -1, 0], [-1, -1, 1]])


class Flat(nn.Module):
    """A model whose features are its images; keeps what it was shown."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, images, batch=None):
        self.shown = images
        return self.head(images, batch)


@pytest.mark.parametrize("mixed", [None, [False, True, False, False, True], [False] * 5, [True] * 5])
@pytest.mark.parametrize("loss", [VariationalPULoss(), PartialBCELoss()], ids=lambda loss: type(loss).__name__)
def test_a_step_is_the_formula(mixed, loss):
    torch.manual_seed(0)
    net = Flat(HEADS.make("pu-mlc", ["consistency=0.7"], 6, 3).double())
    images = torch.randn(5, 6, dtype=torch.float64)
    batch = Batch(TARGETS, torch.arange(5), None if mixed is None else torch.tensor(mixed), 0)
    torch.manual_seed(3)
    total, count = net.head.training_step(net, [images], batch, loss)
    torch.manual_seed(3)
    order = torch.randperm(2).tolist()
    lam = _beta(0.3, torch.device("cpu")).item()
    logits = net.head(images).logits
    main = loss(Output(logits), batch)
    p = logits.sigmoid().tolist()
    soft = [[1.0 if TARGETS[i, c] == 1 else p[i][c] for c in range(3)] for i in range(5)]
    own, pairs = [0.0] * 3, 0
    for j in range(2):
        a, b = order[j], 2 + j
        if mixed is not None and (mixed[a] or mixed[b]):
            continue
        pairs += 1
        z = net.head((lam * images[a] + (1 - lam) * images[b])[None]).logits[0].tolist()
        for c in range(3):
            label = lam * soft[a][c] + (1 - lam) * soft[b][c]
            own[c] += (math.log(label) + math.log1p(math.exp(-z[c]))) ** 2
    wanted = main.total / main.count + 0.7 * sum(own) / max(1, pairs) / 3
    assert (total / count).item() == pytest.approx(wanted.item(), rel=1e-6)
    assert len(net.shown) == 7  # one pass of images and blends
    total.backward()


def test_without_consistency_one_plain_pass():
    net = Flat(HEADS.make("pu-mlc", ["consistency=0"], 6, 3))
    images, batch = torch.randn(5, 6), Batch(TARGETS)
    total, count = net.head.training_step(net, [images], batch, VariationalPULoss())
    assert len(net.shown) == 5
    assert total == VariationalPULoss()(Output(net.head(images).logits), batch).total
    assert count == 3
    one = net.head.training_step(net, [images[:1]], Batch(TARGETS[:1]), VariationalPULoss())  # nothing to mix with
    assert one.total.isfinite()


def test_lambda_is_drawn_from_beta():
    torch.manual_seed(0)
    draws = torch.stack([_beta(0.3, torch.device("cpu")) for _ in range(4000)])
    assert ((draws >= 0) & (draws <= 1)).all()
    assert draws.mean().item() == pytest.approx(0.5, abs=0.03)
    assert draws.var().item() == pytest.approx(1 / (4 * (2 * 0.3 + 1)), abs=0.01)


def test_no_host_sync():
    head = HEADS.make("pu-mlc", [], 8, 4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        head = head.to("cuda")
        batch = Batch(torch.empty(6, 4, device="cuda"), None, torch.empty(6, device="cuda", dtype=torch.bool))
        total, _ = head.training_step(head, [torch.empty(6, 8, device="cuda")], batch, VariationalPULoss())
        assert total.device.type == "cuda"


# --------------------------------------------------------------------------------------------- local-global convolution
def test_branch_as_loops():
    torch.manual_seed(0)
    branch = GlobalBranch(4, 6, (2, 2), heads=2).double().eval()
    nn.init.normal_(branch.norm.weight)
    nn.init.normal_(branch.norm.running_mean)
    x = torch.randn(2, 4, 3, 5, dtype=torch.float64)
    places = [(i, j) for i in range(3) for j in range(5)]

    def layer(conv, vector):
        return conv.weight[:, :, 0, 0] @ vector + conv.bias

    found = branch(x)
    for b in range(2):
        local = {p: layer(branch.reduce, x[b, :, p[0], p[1]]).relu() for p in places}
        everywhere = sum(local.values()) / 15
        both = {p: torch.cat((local[p], everywhere)) for p in places}
        gather = torch.stack([layer(branch.gather, both[p]) for p in places]).softmax(0)  # [positions, heads]
        seen = {p: torch.zeros(4, dtype=torch.float64) for p in places}
        for head in range(2):
            mine = slice(2 * head, 2 * head + 2)
            pooled = sum(gather[k, head] * layer(branch.value, x[b, :, i, j])[mine] for k, (i, j) in enumerate(places))
            for p in places:
                seen[p][mine] = layer(branch.spread, both[p])[head].sigmoid() * pooled
        for i, j in places:
            if i % 2 == 0 and j % 2 == 0:
                out = layer(branch.project, x[b, :, i, j] + seen[i, j])
                norm = branch.norm
                out = (out - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
                torch.testing.assert_close(found[b, :, i // 2, j // 2], out)


@pytest.mark.parametrize("name", ["test_resnet", "regnetx_002"])
def test_a_backbone_starts_out_as_it_was(name):
    torch.manual_seed(0)
    plain = build_model(name, 3, head="pu-mlc").eval()
    torch.manual_seed(0)
    model = build_model(name, 3, head="pu-mlc", head_options=["local_global=true"])
    branches = [m for m in model.backbone.modules() if isinstance(m, LocalGlobalConv2d)]
    assert len(branches) > 3
    images = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(model.eval()(images), plain(images), rtol=0, atol=0.02)
    assert set(plain.state_dict()) < set(model.state_dict())
    model.train()(images).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_weights_of_a_run_and_of_a_backbone_load(tmp_path):
    from safetensors.torch import save_file

    options = {"head": "pu-mlc", "head_options": ["local_global=true"]}
    model = build_model("test_resnet", 3, **options)
    save_file(model.state_dict(), tmp_path / "run.safetensors")
    again = build_model(
        "test_resnet", 3, head="pu-mlc", head_options=["local_global=true"], weights=tmp_path / "run.safetensors"
    )
    images = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(again.eval()(images), model.eval()(images))
    plain = build_model("test_resnet", 3)
    save_file(plain.backbone.state_dict(), tmp_path / "timm.safetensors")
    fresh = build_model(
        "test_resnet", 3, head="pu-mlc", head_options=["local_global=true"], weights=tmp_path / "timm.safetensors"
    )
    state = fresh.backbone.state_dict()
    assert all(torch.equal(state[key], value) for key, value in plain.backbone.state_dict().items())


def test_a_backbone_without_such_convolutions():
    with pytest.raises(ValueError, match="VisionTransformer has no 3x3 convolution"):
        build_model("test_vit", 3, head="pu-mlc", head_options=["local_global=true"])
    assert add_local_global(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1))) == 1


@pytest.mark.parametrize("options", [["consistency=-1"], ["beta=0"]])
def test_bad_arguments_are_named(options):
    with pytest.raises(ValueError, match=options[0].split("=")[0] + "="):
        HEADS.make("pu-mlc", options, 8, 4)
