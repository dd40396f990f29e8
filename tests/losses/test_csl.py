"""losses/csl.py: worked numbers, a slow loop, and where the prior comes from."""

import math

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_logicmix import ClassAwareSelectiveLoss, PartialAsymmetricLoss, estimate_prior, write_prior
from gpu_logicmix.losses.csl import read_prior

NAN = float("nan")
Y = torch.tensor([[1, 0, -1, -1], [-1, -1, -1, 1]])
Z = torch.tensor([[1, -1, 2, 0], [0.5, -2, -0.5, 0]])
PRIOR = torch.tensor([0.02, 0.03, 0.01, 0.4])


@pytest.mark.parametrize(("mode", "value"), [("negative", 2.570004), ("ignore", 1.090658), ("selective", 1.100315)])
def test_worked_numbers(mode, value):
    options = {"mode": mode, "topk": 1, "threshold": 0.05, "prior": PRIOR}
    assert ClassAwareSelectiveLoss(1, 0, 4, 0, "sum", **options)(Z, Y).item() == pytest.approx(value, abs=1e-6)
    if mode == "selective":
        counts = ClassAwareSelectiveLoss(1, 0, 4, 0, "none", **options)(Z, Y) != 0
        assert counts.tolist() == [[True, True, False, False], [False, True, True, True]]


def test_ignore_is_p_asl():
    loss = ClassAwareSelectiveLoss(4, 0, clip=0.05, mode="ignore")
    torch.testing.assert_close(loss(Z, Y), PartialAsymmetricLoss()(Z, Y))


# ------------------------------------------------------------------------------------------------ the slow loop
def cost(z, y, gammas, clip, alphas):
    p = 1 / (1 + math.exp(-z))
    q = min(1 - p + clip, 1)
    if y == 1:
        return alphas[1] * (1 - p) ** gammas[1] * -math.log(p)
    which = 0 if y == 0 else 2
    return alphas[which] * (1 - q) ** gammas[which] * -math.log(q)


@st.composite
def cases(draw):
    b, c = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    # All different: which of several equal logits is ignored is nobody's business.
    z = draw(st.lists(st.integers(-800, 800), min_size=b * c, max_size=b * c, unique=True))
    kinds = draw(st.sampled_from([[-1], [0, 1], [-1, 0, 1], [-1, -1, -1, 1]]))
    y = draw(st.lists(st.lists(st.sampled_from(kinds), min_size=c, max_size=c), min_size=b, max_size=b))
    mixed = draw(st.lists(st.booleans(), min_size=b, max_size=b))
    prior = draw(st.lists(st.sampled_from([0.0, 0.1, 0.6]), min_size=c, max_size=c))
    return torch.tensor(z).double().view(b, c) / 100, torch.tensor(y), torch.tensor(mixed), torch.tensor(prior)


@settings(max_examples=examples(200), deadline=None)
@given(
    case=cases(),
    gammas=st.tuples(st.sampled_from([0, 1, 3]), st.sampled_from([0, 1]), st.sampled_from([0, 2, 4])),
    clip=st.sampled_from([0, 0.05]),
    alphas=st.tuples(*[st.sampled_from([1, 0.5])] * 3),
    mode=st.sampled_from(["selective", "selective", "ignore", "negative"]),
    topk=st.integers(0, 3),
    threshold=st.sampled_from([0, 0.05, 0.5]),
    with_prior=st.booleans(),
    per_group=st.booleans(),
)
def test_is_the_slow_loop(case, gammas, clip, alphas, mode, topk, threshold, with_prior, per_group):
    logits, targets, mixed, prior = case
    b, c = logits.shape
    unknown = [(i, j) for i in range(b) for j in range(c) if targets[i, j] == -1]
    ignored = set(unknown) if mode == "ignore" else set()
    if mode == "selective":
        for kind in (True, False) if per_group else (None,):
            rows = [i for i in range(b) if kind is None or bool(mixed[i]) == kind]
            ranked = sorted((cell for cell in unknown if cell[0] in rows), key=lambda cell: -logits[cell].item())
            ignored |= set(ranked[: topk * len(rows)])
        if with_prior and threshold > 0:
            ignored |= {(i, j) for i, j in unknown if prior[j] > threshold}
    wanted = torch.tensor(
        [
            [
                0.0 if (i, j) in ignored else cost(logits[i, j].item(), targets[i, j].item(), gammas, clip, alphas)
                for j in range(c)
            ]
            for i in range(b)
        ],
        dtype=torch.float64,
    )
    options = {
        "mode": mode,
        "topk": topk,
        "threshold": threshold,
        "prior": prior if with_prior else None,
        "per_group": per_group,
        "alpha_neg": alphas[0],
        "alpha_pos": alphas[1],
        "alpha_unknown": alphas[2],
    }
    arguments = (*gammas, clip)
    found = ClassAwareSelectiveLoss(*arguments, "none", **options)(logits, targets, mixed=mixed)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-10)
    mean = ClassAwareSelectiveLoss(*arguments, **options)(logits, targets, mixed=mixed)
    torch.testing.assert_close(mean, wanted.sum() / max(1, b * c - len(ignored)), rtol=1e-7, atol=1e-10)


# ------------------------------------------------------------------------------------------------ the prior
def test_prior_of_a_model(tmp_path):
    logits = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    prior = estimate_prior(logits)
    torch.testing.assert_close(prior, logits.double().sigmoid().mean(0))
    torch.testing.assert_close(estimate_prior(iter(logits.split(4))), prior)
    names = ["traffic light", 'a "b", c', "=1+1"]
    write_prior(tmp_path / "prior.csv", names, prior)
    assert read_prior(tmp_path / "prior.csv") == dict(zip(names, prior.tolist(), strict=True))
    loss = ClassAwareSelectiveLoss(prior=tmp_path / "prior.csv")
    torch.testing.assert_close(loss.prior, prior.float())
    loss.prepare(None, names[::-1])
    torch.testing.assert_close(loss.prior, prior.float().flip(0))
    with pytest.raises(ValueError, match="no row for 1 categories, the first of them 'dog'"):
        loss.prepare(None, ["dog", *names])


def test_prior_of_the_known_labels():
    labels = torch.tensor([[1, -1, 0], [1, -1, 1], [0, -1, -1], [-1, -1, 0]])
    loss = ClassAwareSelectiveLoss(prior="known", threshold=0.5, topk=0)
    loss.prepare(labels.numpy(), ["a", "b", "c"])
    torch.testing.assert_close(loss.prior, torch.tensor([2 / 3, 0, 1 / 3]))
    ignored = loss.ignored(torch.zeros(4, 3), labels == -1, None)
    assert ignored.nonzero().tolist() == [[3, 0]]


@pytest.mark.parametrize("mode", ["selective", "ignore"])
@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (PRIOR[:3], "prior has 3 entries: must have 4, one for each category$"),
        ("known", r"prior='known': call prepare\(labels, categories\) first"),
        ("file", r"prior has 2 entries: must have 4, .*; prepare\(labels, categories\) takes them by name"),
    ],
)
def test_a_prior_that_does_not_fit_is_not_ignored(prior, message, mode, tmp_path):
    write_prior(tmp_path / "prior.csv", ["a", "b"], PRIOR[:2])
    prior = tmp_path / "prior.csv" if isinstance(prior, str) and prior == "file" else prior
    loss = ClassAwareSelectiveLoss(prior=prior, mode=mode)
    if mode == "ignore":  # which has no use for it
        assert loss(Z, Y).isfinite()
        return
    with pytest.raises(ValueError, match=message):
        loss(Z, Y)
    assert ClassAwareSelectiveLoss(prior=prior, threshold=0)(Z, Y).isfinite()  # nor has this one


def test_a_threshold_of_zero_turns_the_prior_off():
    plain, off, on = (
        ClassAwareSelectiveLoss(topk=0, prior=prior, threshold=threshold)(Z, Y)
        for prior, threshold in ((None, 0.5), (PRIOR, 0), (PRIOR, 1e-6))
    )
    assert off == plain
    assert on == ClassAwareSelectiveLoss(mode="ignore")(Z, Y)


@pytest.mark.parametrize("prior", ["known", "file"])
def test_a_prior_is_loaded_into_a_loss_that_was_not_prepared(prior, tmp_path):
    write_prior(tmp_path / "prior.csv", list("dcbaz"), torch.tensor([0.4, 0.3, 0.2, 0.1, 0.9]))
    prior = tmp_path / "prior.csv" if prior == "file" else prior
    first, second = (ClassAwareSelectiveLoss(prior=prior, threshold=0.15, topk=0) for _ in range(2))
    first.prepare(Y, list("abcd"))
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.prior, first.prior)
    assert len(second.prior) == 4
    assert second(Z, Y) == first(Z, Y)
    with pytest.raises(RuntimeError, match="size mismatch for prior"):  # one that was given is not replaced
        ClassAwareSelectiveLoss(prior=PRIOR[:3]).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n", "has no rows"),
        ("name,value\ncat,0.5\n", "line 2: must have columns Classes and avg_pred"),
        ("Classes,avg_pred\ncat,often\n", "line 2: must have columns"),
        ("Classes,avg_pred\ncat,0.5\ndog,1.5\n", "line 3: 'dog' 1.5 is twice there or not from 0 to 1"),
        ("Classes,avg_pred\ncat,0.5\ncat,0.5\n", "line 3: 'cat' 0.5 is twice there"),
        ("Classes,avg_pred\ncat,nan\n", "line 2"),
    ],
)
def test_bad_prior_files(tmp_path, text, message):
    (tmp_path / "prior.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        ClassAwareSelectiveLoss(prior=str(tmp_path / "prior.csv"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClassAwareSelectiveLoss(mode="best"), "mode='best': must be one of selective, ignore, negative"),
        (lambda: ClassAwareSelectiveLoss(gamma_unknown=-1), "gamma_unknown=-1: must be 0 or more"),
        (lambda: ClassAwareSelectiveLoss(clip=1), "clip=1: must be at least 0 and below 1"),
        (lambda: ClassAwareSelectiveLoss(prior="nowhere.csv"), "prior='nowhere.csv': cannot be read"),
        (lambda: ClassAwareSelectiveLoss(prior=PRIOR).prepare(None, ["a"]), "prior has 4 entries: must have 1"),
        (lambda: ClassAwareSelectiveLoss(prior=PRIOR[None]), r"prior has shape \(1, 4\): must be \[categories\]"),
        (lambda: ClassAwareSelectiveLoss(threshold=-0.1), "threshold=-0.1: must be 0 or more"),
        (lambda: estimate_prior([]), "logits: there are none"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
