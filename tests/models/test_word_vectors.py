"""Word vectors from .npy and from GloVe's text format."""

import numpy as np
import pytest
import torch

from gpu_logicmix import read_word_vectors

TEXT = """the 0.0 0.5 1.0
cat -1.0 2.0 3.0
traffic 1.0 1.0 1.0
light 3.0 5.0 -1.0
TV 7.0 8.0 9.0
. . . 1.0 1.0 1.0
t-shirt 4.0 4.0 4.0
"""


@pytest.fixture
def text(tmp_path):
    (tmp_path / "glove.txt").write_text(TEXT)
    return tmp_path / "glove.txt"


def test_names_are_looked_up_in_the_text(text):
    names = ["cat", "traffic light", "TV", "traffic_light", "Cat", "t-shirt"]
    expected = [[-1, 2, 3], [2, 3, 0], [7, 8, 9], [2, 3, 0], [-1, 2, 3], [4, 4, 4]]
    vectors = read_word_vectors(text, names)
    assert vectors.dtype == torch.float32
    assert vectors.tolist() == expected


def test_a_first_line_of_counts_is_not_a_word(tmp_path):
    (tmp_path / "vec.txt").write_text("2 3\n" + TEXT)
    assert read_word_vectors(tmp_path / "vec.txt", ["cat"]).tolist() == [[-1, 2, 3]]


def test_all_names_that_are_missing_are_listed(text):
    with pytest.raises(ValueError, match=r"3 of 4 category names are not in it: dog, traffic jam, a\\x1b\[31mb; give"):
        read_word_vectors(text, ["cat", "dog", "traffic jam", "a\x1b[31mb"])


def test_lines_of_another_length(tmp_path):
    (tmp_path / "bad.txt").write_text("cat 1 2 3\ndog 1 2\n")
    with pytest.raises(ValueError, match="line 2: 2 numbers, not 3"):
        read_word_vectors(tmp_path / "bad.txt", ["cat", "dog"])


def test_rows_of_a_npy_file_are_the_categories(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(3, 5))
    np.save(tmp_path / "v.npy", vectors)
    torch.testing.assert_close(read_word_vectors(tmp_path / "v.npy", ["a", "b", "c"]), torch.tensor(vectors).float())
    with pytest.raises(ValueError, match=r"float64 \[3, 5\], not floating-point numbers \[2, E\]"):
        read_word_vectors(tmp_path / "v.npy", ["a", "b"])
    np.save(tmp_path / "v.npy", np.array([["x"]], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"not a \.npy file of numbers"):
        read_word_vectors(tmp_path / "v.npy", ["a"])
    np.save(tmp_path / "v.npy", np.full((1, 2), np.nan))
    with pytest.raises(ValueError, match="non-finite"):
        read_word_vectors(tmp_path / "v.npy", ["a"])
    with pytest.raises(ValueError, match="no such file"):
        read_word_vectors(tmp_path / "none.npy", ["a"])


def test_the_papers_vectors_of_coco_are_in_the_order_of_ids(shared):
    vectors = read_word_vectors(shared / "data" / "glove" / "coco_840b.npy", [str(i) for i in range(80)])
    assert vectors.shape == (80, 300)
    assert vectors[15, 0].item() == pytest.approx(-0.15067, abs=1e-5)  # cat
    other = np.load(shared / "data" / "glove" / "mlgcn_coco.npz")  # of ML-GCN: another release, in alphabetical order
    assert other["vectors_6b"][20, 0] == pytest.approx(-0.29353, abs=1e-5)  # cat
