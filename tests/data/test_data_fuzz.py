"""200 damaged versions of the files of each format: a dataset, or an error of one line that names the place."""

import io
import json
import random
import tarfile

import pytest
from test_data_formats import coco_tree, vg_tree, voc_tree
from test_data_more_formats import (
    IMAGES,
    OID,
    chexpert_tree,
    food_tree,
    hf_tree,
    lvis_tree,
    nus_tree,
    oid_tree,
    parquet_tree,
    vaw_tree,
    vg500_tree,
    vispr_tree,
    voc2012_tree,
)
from trees import csv_tree, photo

from gpu_logicmix import open_dataset
from gpu_logicmix.data import FORMATS, DataError


def oid3_tree(root):
    rows = OID.replace(",machine,", ",verification,").replace("0.7", "0")
    oid_tree(root, rows, "train/annotations-human.csv")
    (root / "classes-trainable.txt").write_text("/m/03\n/m/01\n/m/02\n")
    return root


def csl_tree(root):
    for name in "ab":
        (root / "train").mkdir(parents=True, exist_ok=True)
        photo(8, 8).save(root / "train" / f"{name}.jpg")
    rows = "filepath,label,label_neg,split_name\ntrain/a.jpg,\"['/m/02', '/m/01']\",['/m/05'],train\n"
    (root / "data.csv").write_text(rows + "train/b.jpg,[],['/m/02'],train\n")
    return root


def voc2007_tree(root):
    voc_tree(root, {"000005": [("chair", 0), ("chair", 1)], "000007": [("car", 1), ("dog", 0)]})
    return root


def vg200_tree(root):
    root.mkdir()
    return vg_tree(root, {"9.jpg": [0, 199], "4.jpg": [5]})


def tar_tree(root):
    """Two shards as pack writes them."""
    root.mkdir()
    for shard in range(2):
        with tarfile.open(root / f"train-{shard:05d}.tar", "w", format=tarfile.PAX_FORMAT) as file:
            for row in range(2):
                picture = io.BytesIO()
                photo(8, 8, row).save(picture, "JPEG")
                note = json.dumps({"id": f"{shard}-{row}", "present": [row], "unknown": [2]}).encode()
                for content, end in ((picture.getvalue(), ".jpg"), (note, ".json")):
                    member = tarfile.TarInfo(f"{shard}{row}{end}")
                    member.size = len(content)
                    file.addfile(member, io.BytesIO(content))
    whole = {"shards": ["train-00000.tar", "train-00001.tar"], "categories": ["cat", "dog", "cow"], "count": 4}
    (root / "train.json").write_text(json.dumps(whole))
    return root


OID_FILES = ["oidv6-train-annotations-human-imagelabels.csv", "oidv6-classes-trainable.txt", "class-descriptions.csv"]
VOC = "VOCdevkit/VOC{}/Annotations/{}.xml", "VOCdevkit/VOC{}/ImageSets/Main/{}.txt"
TABLE = "image,split,cat,dog\nimg/a.png,train,1,?\nimg/b.png,train,0,1\nimg/c.png,val,,-1\n"
TREES = {
    "openimages": (oid_tree, OID_FILES),
    "openimages as CSL packs it": (csl_tree, ["data.csv"]),
    "openimages-v3": (oid3_tree, ["train/annotations-human.csv", "classes-trainable.txt"]),
    "lvis": (lvis_tree, ["annotations/lvis_v1_train.json"]),
    "chexpert": (chexpert_tree, ["train.csv"]),
    "nuswide": (nus_tree, ["ImageList/TrainImagelist.txt", "GroundTruth/TrainTestLabels/Labels_animal_Train.txt"]),
    "food172": (food_tree, ["SplitAndIngreLabel/IngreLabel.txt", "SplitAndIngreLabel/TR.txt"]),
    "vispr": (vispr_tree, ["train2017/a.json"]),
    "vg200": (vg200_tree, ["vg_category_200_labels_index.json", "train_list_500.txt"]),
    "vg500": (vg500_tree, ["vg_category_500_labels_index.json", "train_list_500.txt"]),
    "voc2007": (voc2007_tree, [VOC[0].format("2007", "000005"), VOC[1].format("2007", "trainval")]),
    "voc2012": (voc2012_tree, [VOC[0].format("2012", "2008_000001"), VOC[1].format("2012", "train")]),
    "coco": (coco_tree, ["annotations/instances_train2014.json"]),
    "vaw": (vaw_tree, ["data/train_part1.json", "data/attribute_index.json"]),
    "csv": (lambda root: csv_tree(root, TABLE, "t.csv").parent, ["t.csv"]),
    "csv with lists": (lambda root: csv_tree(root, "image,labels\nimg/a.png,cat;dog\n", "t.csv").parent, ["t.csv"]),
    "parquet": (lambda root: parquet_tree(root, {"image": IMAGES, "cat": [1, 0, None]}).parent, ["t.parquet"]),
    "hf": (hf_tree, ["train/dataset_info.json", "train/state.json", "train/data-00000-of-00001.arrow"]),
    "tar": (tar_tree, ["train-00000.tar", "train.json"]),
}
WORDS = [b"[", b"]", b"{", b"}", b'"', b",", b"null", b"true", b"-1", b"1e999", b"\n", b"\0", b"\xff", b"../", b"[]"]
WORDS += [b"7" * 30]


def mutated(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 3)):
        # Of a tar, mostly its headers: the rest is pixels.
        length = min(len(data), 3000)
        at, end = sorted((rng.randrange(length + 1), rng.randrange(length + 1)))
        kind = rng.randrange(4)
        if kind == 0:
            data = data[:at] + rng.choice(WORDS) + data[at:]
        elif kind == 1:
            data = data[:at] + data[min(end, at + rng.randint(1, 20)) :]
        elif kind == 2:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        else:
            data = data[:at] + data[at:end] * 2 + data[end:] if end - at < 200 else data[:at]
    return data


def test_every_format_is_here():
    assert {name.partition(" ")[0] for name in TREES} == set(FORMATS) - {"folder"}  # which has no labels


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(TREES))
def test_damaged_files_end_in_one_line(tmp_path, monkeypatch, name):
    """A dataset whose images can be asked for, or a DataError of one line that names a file; never anything else."""
    monkeypatch.setenv("GPU_LOGICMIX_INDEX", "/proc/nowhere")  # nothing is kept, and nothing is synced
    make, files = TREES[name]
    root = make(tmp_path / "tree")
    rng = random.Random(name)
    single = name.startswith(("csv", "parquet"))
    spec = f"{name.partition(' ')[0]}:{root / files[0] if single else root}"
    before = {file: (root / file).read_bytes() for file in files}
    assert len(open_dataset(spec, "train", 8, on_bad_image="skip"))
    messages = []
    for number in range(200):
        file = files[number % len(files)]
        (root / file).write_bytes(mutated(before[file], rng))
        try:
            dataset = open_dataset(spec, "train", 8, on_bad_image="skip")
            assert dataset.labels.shape == (len(dataset), len(dataset.categories))
            if number < 20:
                dataset[list(range(min(len(dataset), 3)))]
        except DataError as error:
            messages.append(str(error))
        finally:
            (root / file).write_bytes(before[file])
    assert len(messages) > 20
    for message in messages:
        assert "\n" not in message
        assert str(root) in message
