"""OpenImages, LVIS, CheXpert, NUS-WIDE, VG-500, VAW, VISPR, VireoFood-172, VOC 2012, Parquet and Hugging Face folders:
small trees in the real layouts, and their odd cases."""

import contextlib
import io
import json
import os
import pickle
import shutil
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image
from trees import photo, picture

from gpu_logicmix import open_dataset
from gpu_logicmix.data import DataError, arrow, make_loader, oidcells, openimages
from gpu_logicmix.data.chexpert import OBSERVATIONS
from gpu_logicmix.data.images import decode_image, read_image, what_changed
from gpu_logicmix.data.index import index_home
from gpu_logicmix.data.sparse import SparseLabels
from gpu_logicmix.data.voc import CATEGORIES as VOC


@pytest.fixture(autouse=True)
def index(tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_LOGICMIX_INDEX", str(tmp_path / "index"))


def refused(match, spec, split="train", **options):
    with pytest.raises(DataError, match=match) as caught:
        open_dataset(spec, split, 16, **options)
    assert "\n" not in str(caught.value)


# --- OpenImages -------------------------------------------------------------------------------------------------------

A, B, C = "000002b66c9c498e", "000002b97e5471a0", "ffff21932da3ed01"
OID = f"""ImageID,Source,LabelName,Confidence
{B},verification,/m/02,1
{A},verification,/m/01,1
{A},crowdsource-verification,/m/03,0
{B},verification,/m/02,1
{C},verification,/m/01,1
{C},verification,/m/01,0
{C},verification,/m/03,1
{A},machine,/m/02,0.7
{A},verification,/m/99,1
"""


def oid_tree(root, text=OID, name="oidv6-train-annotations-human-imagelabels.csv"):
    root.mkdir(exist_ok=True)
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text(text)
    (root / "oidv6-classes-trainable.txt").write_text("/m/03\n/m/01\n/m/02\n")
    (root / "class-descriptions.csv").write_text('/m/01,Cat\n/m/02,"Dog, large"\n/m/03,Cat\n')
    for image in (A, B, C):
        picture(root / "train" / f"{image}.jpg")
    return root


@pytest.fixture(params=["csv", "pyarrow"])
def oid_reader(request, monkeypatch):
    if request.param == "csv":
        monkeypatch.setattr(oidcells, "_fast", lambda *a: None)
    else:
        pytest.importorskip("pyarrow")


def test_openimages(tmp_path, oid_reader):
    root = oid_tree(tmp_path / "oid")
    expected = {"unknown": [-1, 1], "present": [1, 1], "absent": [0, 1]}
    for conflict, (of_c, _) in expected.items():
        dataset = open_dataset(f"openimages:{root}", "train", 16, conflict=conflict)
        assert list(dataset.ids) == [A, B, C]  # sorted
        assert dataset.categories == ["Cat (/m/03)", "Cat (/m/01)", "Dog, large"]  # two classes of one name
        assert dataset.labels.tolist() == [[0, 1, -1], [-1, -1, 1], [1, of_c, -1]]
    assert dataset[[0, 2]][0].shape == (2, 3, 16, 16)
    assert any("1 rows about classes that are not trainable" in line for line in dataset.warnings)
    assert any("1 rows of machines" in line for line in dataset.warnings)
    assert isinstance(open_dataset(f"openimages:{root}", "train", 16, labels="sparse").labels, SparseLabels)
    refused("Confidence '0.7' must be 1 or 0", f"openimages:{root}", machine="keep")
    refused("no validation-annotations-human-imagelabels.csv", f"openimages:{root}", "val")


def test_openimages_second_time_comes_from_its_index(tmp_path, oid_reader, monkeypatch):
    root = oid_tree(tmp_path / "oid")
    first = open_dataset(f"openimages:{root}", "train", 16)
    with monkeypatch.context() as patch:
        patch.setattr(openimages, "read_cells", lambda *a: pytest.fail("read again"))
        again = open_dataset(f"openimages:{root}", "train", 16)
        assert again.fingerprint() == first.fingerprint()
        assert again.warnings == first.warnings
    (folder,) = index_home().iterdir()
    damaged = bytearray((folder / "columns.npy").read_bytes())
    damaged[-1] ^= 1
    (folder / "columns.npy").write_bytes(damaged)  # found out by its checksum, and made again
    assert open_dataset(f"openimages:{root}", "train", 16).fingerprint() == first.fingerprint()
    for nonsense in ("{", "[]", '{"crc32": 5}', '{"crc32": {"x": 1}, "facts": {}}'):
        (folder / "facts.json").write_text(nonsense)
        assert open_dataset(f"openimages:{root}", "train", 16).fingerprint() == first.fingerprint()
    oid_tree(root, OID.replace(f"{B},verification,/m/02,1", f"{B},verification,/m/02,0"))
    assert open_dataset(f"openimages:{root}", "train", 16).labels[1].tolist() == [-1, -1, 0]
    monkeypatch.setenv("GPU_LOGICMIX_INDEX", "/proc/nowhere")  # nothing can be kept: no reason to stop
    assert len(open_dataset(f"openimages:{root}", "train", 16)) == 3


def test_openimages_is_read_by_one_of_several_processes(tmp_path, monkeypatch):
    root, read, calls = oid_tree(tmp_path / "oid"), openimages.read_cells, []

    def slowly(*arguments):
        calls.append(1)
        time.sleep(0.2)
        return read(*arguments)

    monkeypatch.setattr(openimages, "read_cells", slowly)
    with ThreadPoolExecutor(3) as pool:  # locks are of open files: threads wait as processes do
        found = list(pool.map(lambda _: open_dataset(f"openimages:{root}", "train", 16).fingerprint(), range(3)))
    assert len(calls) == 1
    assert found[0] == found[1] == found[2]


def test_openimages_without_a_look_at_each_file(tmp_path, monkeypatch, oid_reader):
    root = oid_tree(tmp_path / "oid")
    monkeypatch.setattr(openimages, "CHECKED", 2)
    (root / "train" / f"{B}.jpg").unlink()
    picture(tmp_path / "secret.jpg")
    os.symlink(tmp_path / "secret.jpg", root / "train" / f"{B}.jpg")
    dataset = open_dataset(f"openimages:{root}", "train", 16, on_bad_image="skip")
    assert dataset[[0, 1, 2]][2].tolist() == [0, 2]  # links are not followed where nobody has looked
    assert "symbolic link" in dataset.bad_images()[0]


def test_openimages_v3_and_csl(tmp_path, oid_reader):
    root = oid_tree(
        tmp_path / "v3", OID.replace(",machine,", ",verification,").replace("0.7", "0"), "train/annotations-human.csv"
    )
    (root / "classes-trainable.txt").write_text("/m/03\n/m/01\n/m/02\n")
    dataset = open_dataset(f"openimages-v3:{root}", "train", 16)
    assert dataset.labels.tolist() == [[0, 1, 0], [-1, -1, 1], [1, -1, -1]]
    root = tmp_path / "csl"
    for name in ("train/a.jpg", "val/b.jpg"):
        picture(root / name)
    rows = "filepath,label,label_neg,split_name\n"
    rows += "train/a.jpg,\"['/m/02', '/m/01']\",['/m/05'],train\nval/b.jpg,[],['/m/02'],val\n"
    (root / "data.csv").write_text(rows)
    assert open_dataset(f"openimages:{root}", "train", 16).labels.tolist() == [[1, 1, 0]]
    assert open_dataset(f"openimages:{root}", "val", 16).labels.tolist() == [[-1, 0, -1]]
    (root / "data.csv").write_text(rows.replace("['/m/05']", "[/m/05"))
    refused(r"data.csv, line 2: '\[/m/05' is not a list of classes", f"openimages:{root}")


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (f"{B},verification,/m/02,1", f"{B},verification,/m/02,2", "line 2: Confidence '2' must be 1 or 0"),
        (f"{A},verification,/m/01,1", "xyz,verification,/m/01,1", "line 3: ImageID 'xyz' is not of 16 hex digits"),
        (f"{A},verification,/m/01,1", "../../../etc/pa,verification,/m/01,1", "line 3: ImageID"),
        (f"{A},verification,/m/01,1", f"{A},/m/01,1", "line 3: 3 cells, but the header has 4"),
        ("ImageID", "Image", "no column 'ImageID'"),
        ("/m/0", "/m/7", "no row is about one of the 3 trainable classes"),
    ],
)
def test_openimages_mistakes(tmp_path, oid_reader, old, new, match):
    refused(match, f"openimages:{oid_tree(tmp_path / 'oid', OID.replace(old, new))}")


# --- LVIS -------------------------------------------------------------------------------------------------------------


def lvis_tree(root, **changes):
    url = "http://images.cocodataset.org/train2017/{}.jpg"
    images = [
        {"id": 9, "coco_url": url.format("9"), "neg_category_ids": [3], "not_exhaustive_category_ids": []},
        {"id": 4, "coco_url": url.format("4"), "neg_category_ids": [], "not_exhaustive_category_ids": [2]},
    ]
    annotations = [{"id": 1, "image_id": 9, "category_id": 1}, {"id": 2, "image_id": 4, "category_id": 2}]
    categories = [{"id": c, "name": name} for c, name in ((3, "zebra"), (1, "aerosol"), (2, "wok"))]
    data = {"images": images, "annotations": annotations, "categories": categories, **changes}
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    (root / "annotations" / "lvis_v1_train.json").write_text(json.dumps(data))
    for name in ("9", "4"):
        picture(root / "train2017" / f"{name}.jpg")
    return root


def test_lvis(tmp_path):
    dataset = open_dataset(f"lvis:{lvis_tree(tmp_path / 'a')}", "train", 16)
    assert dataset.categories == ["aerosol", "wok", "zebra"]
    assert dataset.labels.tolist() == [[1, -1, 0], [-1, 1, -1]]
    assert dataset.ids == ["9", "4"]
    assert dataset[[0, 1]][0].shape == (2, 3, 16, 16)
    image = {"id": 9, "coco_url": "x/train2017/9.jpg"}
    for wrong, match in (
        ({"neg_category_ids": [7]}, r"images\[0\] has 7 in neg_category_ids"),
        ({"neg_category_ids": 7}, r"images\[0\] has the neg_category_ids 7"),
        ({"not_exhaustive_category_ids": [[1]]}, r"images\[0\] has \[1\] in not_exhaustive"),
        ({"coco_url": None}, "image id 9 has the coco_url None"),
        ({"coco_url": "x/../../9.jpg"}, "image id 9 has the coco_url"),
    ):
        refused(match, f"lvis:{lvis_tree(tmp_path / 'b', images=[{**image, **wrong}], annotations=[])}")
    both = lvis_tree(
        tmp_path / "c", images=[{**image, "neg_category_ids": [1]}], annotations=[{"image_id": 9, "category_id": 1}]
    )
    for conflict, value in (("present", 1), ("absent", 0), ("unknown", -1)):
        assert open_dataset(f"lvis:{both}", "train", 16, conflict=conflict).labels[0, 0] == value


# --- CheXpert ---------------------------------------------------------------------------------------------------------


def chexpert_tree(root, rows=None, split="train"):
    rows = rows or [("p1/s1/v1.jpg", {"Edema": "1.0", "Cardiomegaly": "-1.0"}), ("p2/s1/v1.jpg", {"No Finding": "0.0"})]
    header = ["Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", *OBSERVATIONS]
    lines = [",".join(header)]
    for path, values in rows:
        lines.append(
            ",".join(
                [
                    f"CheXpert-v1.0-small/{split}/{path}",
                    "F",
                    "68",
                    "Frontal",
                    "AP",
                    *(values.get(o, "") for o in OBSERVATIONS),
                ]
            )
        )
        (root / split / path).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(ValueError, OSError):
            photo().convert("L").save(root / split / path)  # one channel, as X-rays have
    (root / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return root


def test_chexpert(tmp_path):
    root = chexpert_tree(tmp_path / "CheXpert-v1.0-small")
    edema, heart, nothing = (OBSERVATIONS.index(name) for name in ("Edema", "Cardiomegaly", "No Finding"))
    for uncertain, value in (("unknown", -1), ("present", 1), ("absent", 0)):
        labels = open_dataset(f"chexpert:{root}", "train", 16, uncertain=uncertain).labels
        expected = np.full((2, 14), -1)
        expected[0, edema], expected[0, heart], expected[1, nothing] = 1, value, 0
        assert np.array_equal(labels, expected)
    five = open_dataset(f"chexpert:{root}", "train", 16, observations="5")
    assert five.labels.tolist() == [[-1, -1, -1, 1, -1], [-1] * 5]
    image = five[0][0]
    assert torch.equal(image[0], image[2])  # grey
    chexpert_tree(root, split="valid")
    assert len(open_dataset(f"chexpert:{root}", "val", 16)) == 2
    above = open_dataset(f"chexpert:{_moved(root)}", "train", 16)  # the folder that holds the archive's
    assert above[0][0].shape == (3, 16, 16)
    refused(
        "line 2, column 'Edema': 'yes' is not a label",
        f"chexpert:{chexpert_tree(tmp_path / 'x', [('a.jpg', {'Edema': 'yes'})])}",
    )
    refused("leads out", f"chexpert:{chexpert_tree(tmp_path / 'y', [('../../../a.jpg', {})])}")


def _moved(root):
    shutil.copy(root / "train.csv", root.parent)
    return root.parent


def test_sixteen_bit_xrays(tmp_path):
    wide = np.linspace(0, 65535, 256).reshape(16, 16).astype(np.uint16)
    root = chexpert_tree(tmp_path / "c", [("a.png", {"Edema": "1.0"})])
    Image.fromarray(wide).save(root / "train" / "a.png")
    image = open_dataset(f"chexpert:{root}", "train", 16)[0][0]
    assert np.array_equal(image[0].numpy(), wide >> 8)
    (tmp_path / "a.pgm").write_bytes(b"P5 16 16 65535\n" + wide.astype(">u2").tobytes())
    assert np.array_equal(read_image(tmp_path / "a.pgm", 16)[:, :, 0].numpy(), wide >> 8)


# --- NUS-WIDE, VireoFood-172, VISPR, VG-500, VOC 2012 -----------------------------------------------------------------


def nus_tree(root):
    (root / "ImageList").mkdir(parents=True)
    truth = root / "GroundTruth" / "TrainTestLabels"
    truth.mkdir(parents=True)
    (root / "Concepts81.txt").write_text("airport\nanimal\n")
    (root / "ImageList" / "TrainImagelist.txt").write_text("actor\\0001_1.jpg\nbeach\\0002_2.jpg\nbeach\\0003_3.jpg\n")
    (truth / "Labels_airport_Train.txt").write_text("1\n0\n0\n")
    (truth / "Labels_animal_Train.txt").write_text("1 \n0 \n1 \n")
    for name in ("actor/0001_1.jpg", "beach/0002_2.jpg", "beach/0003_3.jpg"):
        picture(root / "Flickr" / name)
    return root


def test_nuswide(tmp_path):
    root = nus_tree(tmp_path / "nus")
    dataset = open_dataset(f"nuswide:{root}", "train", 16)
    assert dataset.labels.tolist() == [[1, 1], [0, 0], [0, 1]]
    assert dataset[[0, 1, 2]][0].shape == (3, 3, 16, 16)
    assert open_dataset(f"nuswide:{root}", "train", 16, empty="drop").ids == ["actor/0001_1.jpg", "beach/0003_3.jpg"]
    shutil.move(root / "Flickr", tmp_path / "aside")
    for name in ("0001_1.jpg", "0002_2.jpg", "0003_3.jpg"):
        picture(root / "images" / name)  # as mlcpl wants them
    assert open_dataset(f"nuswide:{root}", "train", 16).ids[0] == "0001_1.jpg"
    shutil.rmtree(root / "images")
    shutil.move(tmp_path / "aside", root / "images")
    (root / "images" / "actor" / "0001_1.jpg").unlink()  # many are no longer at Flickr, and the first may be of them
    dataset = open_dataset(f"nuswide:{root}", "train", 16, on_bad_image="skip")
    assert dataset[[0, 1, 2]][2].tolist() == [1, 2]
    truth = root / "GroundTruth" / "TrainTestLabels" / "Labels_animal_Train.txt"
    truth.write_text("1\n0\n")
    refused("2 lines, but the list has 3 images", f"nuswide:{root}")
    truth.write_text("1\n0\n2\n")
    refused("line 3: '2' must be 0 or 1", f"nuswide:{root}")


def food_tree(root):
    home = root / "SplitAndIngreLabel"
    home.mkdir(parents=True)
    (home / "TR.txt").write_text("/1/1_1.jpg\n/2/2_7.jpg\n")
    (home / "IngreLabel.txt").write_text("/2/2_7.jpg -1 1 1\n/1/1_1.jpg 1 0 -1\n/9/9_9.jpg 1 1 1\n")
    (home / "IngredientList.txt").write_text("Minced green onion\nGarlic clove\nSalt\n")
    for name in ("1/1_1.jpg", "2/2_7.jpg"):
        picture(root / "ready_chinese_food" / name)
    return root


def test_food172(tmp_path):
    root = food_tree(tmp_path / "food")
    dataset = open_dataset(f"food172:{root}", "train", 16)
    assert dataset.labels.tolist() == [[1, 0, 0], [0, 1, 1]]
    assert dataset[[0, 1]][0].shape == (2, 3, 16, 16)
    labels = root / "SplitAndIngreLabel" / "IngreLabel.txt"
    for text, match in (
        ("/1/1_1.jpg 1 0 -1\n", "line 2: '/2/2_7.jpg' has no labels in IngreLabel.txt"),
        ("/1/1_1.jpg 1 0\n", "line 1: 2 numbers, but there are 3 ingredients"),
        ("/1/1_1.jpg 1 0 5\n", "line 1: '5' must be 1, 0 or -1"),
    ):
        labels.write_text(text)
        refused(match, f"food172:{root}")


def vispr_tree(root):
    for part, name, labels in (("train", "a", ["a1_age", "a0_safe"]), ("train", "b", []), ("val", "c", ["a2_hair"])):
        picture(root / f"{part}2017" / f"{name}.jpg")
        entry = {"id": name, "image_path": f"images/{part}2017/{name}.jpg", "labels": labels}
        (root / f"{part}2017" / f"{name}.json").write_text(json.dumps(entry))
    return root


def test_vispr(tmp_path):
    root = vispr_tree(tmp_path / "v")
    dataset = open_dataset(f"vispr:{root}", "train", 16)
    assert dataset.categories == ["a0_safe", "a1_age", "a2_hair"]  # the same for all splits
    assert dataset.labels.tolist() == [[1, 1, 0], [0, 0, 0]]
    assert dataset[[0, 1]][0].shape == (2, 3, 16, 16)
    assert open_dataset(f"vispr:{root}", "val", 16).labels.tolist() == [[0, 0, 1]]
    (root / "images").mkdir()
    shutil.copytree(root / "train2017", root / "images" / "train2017")
    (root / "images" / "train2017" / "a.jpg").unlink()
    (root / "train2017" / "b.jpg").unlink()
    dataset = open_dataset(f"vispr:{root}", "train", 16, on_bad_image="skip")
    assert dataset[[0, 1]][2].tolist() == [1]  # the first is missing, the others are where image_path says
    shutil.rmtree(root / "images")
    picture(root / "train2017" / "b.jpg")
    (root / "attributes.tsv").write_text("idx\tattribute_id\tname\n0\ta1_age\tAge\n1\ta0_safe\tSafe\n")
    assert open_dataset(f"vispr:{root}", "train", 16).categories == ["a1_age", "a0_safe"]
    refused(r"c.json: category 'a2_hair' is not in the list of attributes.tsv", f"vispr:{root}", "val")
    (root / "train2017" / "b.json").write_text('{"id": 1, "labels": [3], "image_path": "x.jpg"}')
    refused(r"b.json: must have an id, an image_path and a list of labels", f"vispr:{root}")


def vg500_tree(root):
    root.mkdir(exist_ok=True)
    (root / "train_list_500.txt").write_text("1.jpg\n2.jpg\n")
    (root / "test_list_500.txt").write_text("2.jpg\n")
    (root / "vg_category_500_labels_index.json").write_text(json.dumps({"1.jpg": [499, 3], "2.jpg": [0]}))
    picture(root / "VG_100K" / "1.jpg")
    picture(root / "VG_100K_2" / "2.jpg")
    return root


def test_vg500_and_the_warning(tmp_path):
    root = vg500_tree(tmp_path / "vg")
    dataset = open_dataset(f"vg500:{root}", "train", 16)
    assert [np.flatnonzero(row).tolist() for row in dataset.labels] == [[3, 499], [0]]
    assert dataset.warnings == []
    assert (
        "1 images are in val and in train as well, as '2.jpg'" in open_dataset(f"vg500:{root}", "val", 16).warnings[0]
    )


def voc2012_tree(root):
    home = root / "VOCdevkit" / "VOC2012"
    for part, name in (("train", "2008_000001"), ("val", "2008_000002")):
        for folder in ("ImageSets/Main", "Annotations"):
            (home / folder).mkdir(parents=True, exist_ok=True)
        (home / "ImageSets" / "Main" / f"{part}.txt").write_text(name)
        (home / "Annotations" / f"{name}.xml").write_text("<annotation><object><name>cow</name></object></annotation>")
        picture(home / "JPEGImages" / f"{name}.jpg")
    return root


def test_voc2012(tmp_path):
    root = voc2012_tree(tmp_path / "voc")
    for split, name in (("train", "2008_000001"), ("val", "2008_000002")):
        dataset = open_dataset(f"voc2012:{root}", split, 16)
        assert dataset.ids == [name]
        assert np.flatnonzero(dataset.labels[0]).tolist() == [VOC.index("cow")]
    refused("split='test'", f"voc2012:{root}", "test")


# --- VAW --------------------------------------------------------------------------------------------------------------


def vaw_tree(root):
    (root / "data").mkdir(parents=True, exist_ok=True)
    (root / "data" / "attribute_index.json").write_text(json.dumps({"red": 0, "round": 1, "wet": 2}))
    pixels = np.zeros((20, 30, 3), dtype=np.uint8)
    pixels[5:15, 10:20] = (250, 0, 0)
    (root / "VG_100K").mkdir(exist_ok=True)
    Image.fromarray(pixels).save(root / "VG_100K" / "77.jpg", quality=100, subsampling=0)
    sample = {"image_id": "77", "instance_id": "7", "instance_bbox": [10.0, 5.0, 10.0, 10.0]}
    one = {**sample, "positive_attributes": ["red"], "negative_attributes": ["wet"]}
    two = {
        **sample,
        "instance_id": "8",
        "instance_bbox": [0, 0, 8, 4],
        "positive_attributes": [],
        "negative_attributes": ["red"],
    }
    (root / "data" / "train_part1.json").write_text(json.dumps([one]))
    (root / "data" / "train_part2.json").write_text(json.dumps([two]))
    return root


def test_vaw_cuts_objects_out(tmp_path):
    root = vaw_tree(tmp_path / "vaw")
    dataset = open_dataset(f"vaw:{root}", "train", 8)
    assert dataset.labels.tolist() == [[1, -1, 0], [0, -1, -1]]
    assert dataset.ids == ["7", "8"]
    images = dataset[[0, 1]][0].float().mean((2, 3))
    assert images[0, 0] > 200  # the red square, and nothing but it
    assert images[0, 1] < 30
    assert images[1].max() < 10
    before = dataset.fingerprint()
    part = root / "data" / "train_part2.json"
    part.write_text(part.read_text().replace("[0, 0, 8, 4]", "[10, 5, 8, 4]"))  # a cache of the old one is of no use
    dataset = open_dataset(f"vaw:{root}", "train", 8)
    assert dataset[1][0].float().mean((1, 2))[0] > 200
    assert what_changed(before, dataset.fingerprint()) == ["files"]
    (tmp_path / "genome").mkdir()
    shutil.move(root / "VG_100K", tmp_path / "genome" / "VG_100K")
    assert open_dataset(f"vaw:{root}", "train", 8, genome=str(tmp_path / "genome"))[0][0].shape == (3, 8, 8)
    file = root / "data" / "train_part1.json"
    sample = json.loads(file.read_text())[0]
    for change, match in (
        ({"instance_bbox": [1, 2, 0, 3]}, "instance_bbox"),
        ({"instance_bbox": "x"}, "instance_bbox 'x' must be"),
        ({"image_id": "../7"}, "image_id '../7' must be a number"),
        ({"positive_attributes": ["blue"]}, "'blue' in positive_attributes is not in attribute_index"),
        ({"positive_attributes": 5}, "positive_attributes must be a list"),
        ({"instance_id": "8"}, "instance '8' is there twice"),
    ):
        file.write_text(json.dumps([{**sample, **change}]))
        refused(match, f"vaw:{root}", genome=str(tmp_path / "genome"))
    file.write_text(json.dumps([{**sample, "instance_bbox": [100, 100, 5, 5]}]))
    dataset = open_dataset(f"vaw:{root}", "train", 8, genome=str(tmp_path / "genome"), on_bad_image="skip")
    assert dataset[[0, 1]][2].tolist() == [1]
    assert "outside of the image" in dataset.bad_images()[0]


# --- Parquet and Hugging Face -----------------------------------------------------------------------------------------


def parquet_tree(root, columns):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    root.mkdir(exist_ok=True)
    for name in "abc":
        picture(root / "img" / f"{name}.png")
    parquet.write_table(pa.table(columns), root / "t.parquet")
    return root / "t.parquet"


IMAGES = ["img/a.png", "img/b.png", "img/c.png"]


def test_parquet(tmp_path):
    columns = {"image": IMAGES, "cat": [1, 0, None], "dog": [True, None, False], "cow": [0.0, float("nan"), -1.0]}
    file = parquet_tree(tmp_path / "p", columns)
    dataset = open_dataset(f"parquet:{file}", "train", 16)
    assert dataset.labels.tolist() == [[1, 1, 0], [0, -1, -1], [-1, 0, -1]]
    assert dataset[[0, 1, 2]][0].shape == (3, 3, 16, 16)
    listed = {"image": IMAGES, "labels": [["cat", "dog"], [], ["cow"]], "split": ["train", "train", "validation"]}
    file = parquet_tree(tmp_path / "p", listed)
    assert open_dataset(f"parquet:{file}", "train", 16).labels.tolist() == [[1, 0, 1], [0, 0, 0]]
    assert open_dataset(f"parquet:{file}", "val", 16, others="unknown").labels.tolist() == [[-1, 1, -1]]
    shutil.copy(file, file.parent / "train-00000-of-00001.parquet")
    assert len(open_dataset(f"parquet:{file.parent}", "train", 16)) == 2
    for columns, match in (
        ({"image": IMAGES, "cat": [1, 2, 3]}, "row 1, column 'cat': '2' is not a label.*2 such cells"),
        ({"image": IMAGES, "cat": ["x", "y", "z"]}, "column 'cat': is of type"),
        ({"image": [1, 2, 3], "cat": [1, 1, 1]}, "row 0, column 'image': '1' is not a text"),
        ({"image": ["img/a.png", "./img/a.png", "x"], "cat": [1, 1, 1]}, "row 1: 'img/a.png' is in row 0 already"),
        ({"image": ["../a.png", "b", "c"], "cat": [1, 1, 1]}, "row 0: .*leads out"),
        ({"file": IMAGES, "cat": [1, 1, 1]}, "no column 'image'"),
    ):
        refused(match, f"parquet:{parquet_tree(tmp_path / 'q', columns)}")
    file.write_bytes(b"PAR1 nonsense PAR1")
    refused("cannot be read as Parquet", f"parquet:{file}")


@pytest.mark.parametrize("form", ["bytes", "struct"])
def test_images_inside_of_parquet(tmp_path, form):
    """The same as from files, in any order, from several files and row groups, and in another process."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    pictures = []
    for i in range(7):
        out = io.BytesIO()
        photo(20, 16, seed=i).save(out, "PNG")
        pictures.append(out.getvalue() if i != 5 else b"broken")
    for name, part in (("train-00000-of-00002", slice(0, 4)), ("train-00001-of-00002", slice(4, 7))):
        some = pictures[part]
        images = pa.array(some) if form == "bytes" else pa.array([{"bytes": data, "path": None} for data in some])
        split = ["train"] * (len(some) - 1) + ["val"]
        columns = {"image": images, "split": split, "cat": [i % 2 for i in range(7)][part]}
        parquet.write_table(pa.table(columns), tmp_path / f"{name}.parquet", row_group_size=2)
    dataset = open_dataset(f"parquet:{tmp_path}", "train", 16, on_bad_image="skip")
    assert dataset.labels[:, 0].tolist() == [0, 1, 0, 0, 1]
    assert dataset.ids == ["0", "1", "2", "4", "5"]
    images, _, index = pickle.loads(pickle.dumps(dataset))[[3, 0, 4, 2, 1, 0]]
    assert index.tolist() == [3, 0, 2, 1, 0]
    for image, row in zip(images, (4, 0, 2, 1, 0), strict=True):
        assert torch.equal(image, decode_image(io.BytesIO(pictures[row]), "", 16).permute(2, 0, 1))
    assert len(dataset[[4]][0]) == 0
    assert "row 5: cannot be decoded" in dataset.bad_images()[0]
    assert dataset.take([0]).fingerprint() != dataset.take([1]).fingerprint()


def test_several_threads_read_images_inside_of_parquet(tmp_path, monkeypatch):
    """As when a cache is built: what one keeps, another may not lose."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    class Slow(OrderedDict):
        def move_to_end(self, key, last=True):
            time.sleep(0.002)
            super().move_to_end(key, last)

    picture(tmp_path / "x.png")
    table = pa.table({"image": [(tmp_path / "x.png").read_bytes()] * 40, "cat": [1] * 40})
    parquet.write_table(table, tmp_path / "train.parquet", row_group_size=2)
    monkeypatch.setattr(arrow, "_BYTES", 0)  # so that groups are read and forgotten all the time
    source = open_dataset(f"parquet:{tmp_path}", "train", 8).source
    source._kept = Slow()
    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(source.read, [7 * i % 40 for i in range(40)]))) == 40
    assert len(source._kept) == arrow._GROUPS


def hf_tree(root, split="train"):
    pa = pytest.importorskip("pyarrow")
    folder = root / split
    folder.mkdir(parents=True)
    picture(root / "x.png")
    data = (root / "x.png").read_bytes()
    images = pa.array(
        [{"bytes": data, "path": "x.png"}, {"bytes": b"broken", "path": None}, {"bytes": data, "path": None}]
    )
    table = pa.table({"image": images, "labels": pa.array([[0, 2], [], [1]])})
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as out,
    ):
        out.write_table(table)
    label = {"names": ["cat", "dog", "cow"], "_type": "ClassLabel"}
    features = {"image": {"_type": "Image"}, "labels": {"feature": label, "_type": "Sequence"}}
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    return root


def test_hf(tmp_path):
    root = hf_tree(tmp_path / "hf")
    dataset = open_dataset(f"hf:{root}", "train", 16, on_bad_image="skip")
    assert dataset.categories == ["cat", "dog", "cow"]
    assert dataset.labels.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    (batch,) = make_loader(dataset, 3, workers=1)
    assert batch[2].tolist() == [0, 2]
    assert "row 1: cannot be decoded" in dataset.bad_images()[0]
    assert open_dataset(f"hf:{root / 'train'}", "train", 16, others="unknown").labels.tolist()[0] == [1, -1, 1]
    refused("no folder validation or val", f"hf:{root}", "val")
    assert dataset.fingerprint() == open_dataset(f"hf:{root}", "train", 16).fingerprint()


def test_hf_as_the_library_writes_it(tmp_path):
    datasets = pytest.importorskip("datasets")
    picture(tmp_path / "x.png")
    features = datasets.Features(
        {"image": datasets.Image(), "labels": datasets.Sequence(datasets.ClassLabel(names=["cat", "dog"]))}
    )
    rows = {"image": [str(tmp_path / "x.png")] * 2, "labels": [[1], [0, 1]]}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows, features=features)}).save_to_disk(
        str(tmp_path / "d")
    )
    dataset = open_dataset(f"hf:{tmp_path / 'd'}", "train", 16)
    assert dataset.labels.tolist() == [[0, 1], [1, 1]]
