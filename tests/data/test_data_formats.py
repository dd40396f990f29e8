"""COCO, VOC 2007, VG-200, CSV and folders: real file formats in small, and everything that can be wrong with them."""

import json
import os

import numpy as np
import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import csv_tree, picture

from gpu_logicmix import hide_labels, open_dataset
from gpu_logicmix.data import DataError, csvfile
from gpu_logicmix.data.files import check_paths
from gpu_logicmix.data.voc import CATEGORIES as VOC


def refused(match, spec, split="train", **options):
    """Opening ends in one line."""
    with pytest.raises(DataError, match=match) as caught:
        open_dataset(spec, split, 16, **options)
    assert "\n" not in str(caught.value)


# --- COCO -------------------------------------------------------------------------------------------------------------


def coco_tree(root, year="2014", images=None, annotations=None, categories=None):
    images = images if images is not None else [{"id": i, "file_name": f"{i}.jpg"} for i in (7, 3, 5)]
    if annotations is None:
        pairs = [(7, 2), (7, 2), (3, 9), (3, 2)]
        annotations = [{"id": n, "image_id": i, "category_id": c, "iscrowd": n % 2} for n, (i, c) in enumerate(pairs)]
    categories = categories or [{"id": 9, "name": "zebra"}, {"id": 2, "name": "apple"}]
    for entry in images:
        if isinstance(entry, dict) and "/" not in str(entry.get("file_name", "/")) and entry["file_name"]:
            picture((root / f"train{year}" / str(entry["file_name"])).with_suffix(".jpg"))
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    data = {"images": images, "annotations": annotations, "categories": categories}
    (root / "annotations" / f"instances_train{year}.json").write_text(json.dumps(data))
    return root


def test_coco_mini_equals_the_official_labels_row_by_row(shared):
    npz = np.load(shared / "data" / "coco2014_labels.npz")
    row_of = {int(image): row for row, image in enumerate(npz["image_ids"])}
    for split, count in (("train", 6000), ("val", 2500)):
        dataset = open_dataset(f"coco:{shared / 'data' / 'coco-mini'}", split, size=32)
        assert dataset.labels.shape == (count, 80)
        assert dataset.labels.dtype == np.int8
        rows = [row_of[int(image)] for image in dataset.ids]
        assert np.array_equal(dataset.labels, npz["labels"][rows])
        assert dataset.categories == npz["category_names"].tolist()
        assert (npz["split"][rows] == split).all()
        image, targets, index = dataset[11]
        assert image.shape == (3, 32, 32)
        assert np.array_equal(targets.numpy(), dataset.labels[11])
        assert index == 11


def test_coco_hcp_mask_is_the_numpy_recipe_and_keeps_the_share(shared):
    npz = np.load(shared / "data" / "coco2014_labels.npz")
    labels = npz["labels"][npz["split"] == "train"].astype(np.int8)
    np.random.seed(0)
    draw = np.random.random(labels.shape)
    for known in (0.1, 0.5, 0.9):
        hidden = hide_labels(labels, known, protocol="hcp")
        assert np.array_equal(hidden, np.where(draw < known, labels, -1))
        assert abs((hidden >= 0).mean() - known) < 0.001
        assert abs((hide_labels(labels, known, seed=3) >= 0).mean() - known) < 0.001


@pytest.mark.parametrize("year", ["2014", "2017"])
def test_coco_labels_and_order(tmp_path, year):
    dataset = open_dataset(f"coco:{coco_tree(tmp_path, year)}", "train", 16)
    assert dataset.ids == ["7", "3", "5"]  # the order of the file
    assert dataset.categories == ["apple", "zebra"]  # the order of the category ids
    assert dataset.labels.tolist() == [[1, 0], [1, 1], [0, 0]]
    dropped = open_dataset(f"coco:{tmp_path}", "train", 16, empty="drop")
    assert dropped.ids == ["7", "3"]
    assert dropped[1][0].shape == (3, 16, 16)


def test_coco_years_and_nested_images(tmp_path):
    coco_tree(tmp_path, "2014")
    coco_tree(tmp_path, "2017")
    refused("2014 and 2017.*year=", f"coco:{tmp_path}")
    assert len(open_dataset(f"coco:{tmp_path}", "train", 16, year="2017")) == 3
    (tmp_path / "images").mkdir()
    (tmp_path / "train2017").rename(tmp_path / "images" / "train2017")
    assert open_dataset(f"coco:{tmp_path}", "train", 16, year="2017")[0][0].shape == (3, 16, 16)
    refused("no annotations/instances_val2014.json or", f"coco:{tmp_path}", "val")
    refused("empty='no'", f"coco:{tmp_path}", empty="no")
    refused("split='trian'", f"coco:{tmp_path}", "trian")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"annotations": [{"id": 4, "image_id": 7, "category_id": 77}]}, "annotation id 4 has category_id 77"),
        ({"annotations": [{"id": 4, "image_id": 8, "category_id": 2}]}, "annotation id 4 is about image id 8"),
        ({"annotations": [{"id": 4, "category_id": 2}]}, r"annotations\[0\] has no 'image_id'"),
        ({"images": [{"id": 1, "file_name": "a.jpg"}, {"id": 1, "file_name": "b.jpg"}]}, r"images\[1\] .* same id"),
        ({"images": [{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": "a.jpg"}]}, "same file_name"),
        ({"images": []}, "lists no images"),
        ({"images": [{"id": 1, "file_name": "../x/a.jpg"}], "annotations": []}, "image id 1: .*leads out"),
        ({"images": [{"id": 1, "file_name": "/etc/passwd"}], "annotations": []}, "image id 1: .*leads out"),
        ({"images": [{"id": 1, "file_name": 7}]}, r"images\[0\] has the file_name 7; must be a text"),
        ({"images": [{"id": 1, "file_name": None}]}, r"images\[0\] has the file_name None"),
        ({"images": [{"id": 1, "file_name": ""}]}, r"images\[0\] has the file_name ''"),
        ({"images": [{"id": [1], "file_name": "a.jpg"}]}, r"images\[0\] has the id \[1\]; all must be whole numbers"),
        ({"images": [{"id": {"a": 1}, "file_name": "a.jpg"}]}, r"images\[0\] has the id"),
        ({"images": [{"id": True, "file_name": "a.jpg"}]}, r"images\[0\] has the id True"),
        (
            {"images": [{"id": 1, "file_name": "a.jpg"}, {"id": "2", "file_name": "b.jpg"}]},
            r"images\[1\] has the id '2'",
        ),
        ({"annotations": [{"id": 4, "image_id": [7], "category_id": 2}]}, r"is about image id \[7\]"),
        ({"annotations": [{"id": 4, "image_id": 7, "category_id": {}}]}, r"has category_id {}"),
        ({"annotations": ["x"]}, r"annotations\[0\] has no 'image_id'"),
        ({"categories": [{"id": 2, "name": None}]}, r"categories\[0\] has the name None; must be a text"),
        ({"categories": [{"id": [2], "name": "a"}]}, r"categories\[0\] has the id \[2\]"),
        ({"categories": [{"id": 2, "name": "a"}, {"id": 9, "name": "a"}]}, r"categories\[1\] has the same name"),
        ({"categories": [{"id": 2, "name": "a"}, {"id": "9", "name": "b"}]}, r"categories\[1\] has the id '9'"),
    ],
)
def test_coco_mistakes(tmp_path, change, match):
    refused(match, f"coco:{coco_tree(tmp_path, **change)}")


def test_coco_broken_files(tmp_path):
    file = coco_tree(tmp_path) / "annotations" / "instances_train2014.json"
    text = file.read_text()
    file.write_text("")
    refused("instances_train2014.json: the file is empty", f"coco:{tmp_path}")
    file.write_text(text[:100])
    refused("invalid JSON in line 1, column", f"coco:{tmp_path}")
    file.write_text("[1, 2]")
    refused("no list 'images'", f"coco:{tmp_path}")
    file.write_bytes(b"\xff\xfe{}")
    refused("not UTF-8", f"coco:{tmp_path}")


def test_missing_images_stop_or_are_skipped(tmp_path):
    coco_tree(tmp_path)
    (tmp_path / "train2014" / "3.jpg").unlink()
    refused(r"3.jpg: no such file \(1 of 3 images are missing\).*on_bad_image='skip'", f"coco:{tmp_path}")
    dataset = open_dataset(f"coco:{tmp_path}", "train", 16, on_bad_image="skip")
    images, targets, index = dataset[[0, 1, 2]]
    assert index.tolist() == [0, 2]
    assert len(images) == len(targets) == 2
    assert len(dataset.bad_images()) == 1
    assert "3.jpg: no such file" in dataset.bad_images()[0]


# --- VOC 2007 ---------------------------------------------------------------------------------------------------------

XML = """<annotation><folder>VOC2007</folder><filename>{name}.jpg</filename><size><width>20</width></size>{objects}
</annotation>"""


def voc_tree(root, images, part="trainval"):
    home = root / "VOCdevkit" / "VOC2007"
    for folder in ("ImageSets/Main", "Annotations", "JPEGImages"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    (home / "ImageSets" / "Main" / f"{part}.txt").write_text("".join(f"{name}\n" for name in images))
    for name, objects in images.items():
        nodes = "".join(
            f"<object><name>{c}</name><pose>Left</pose><difficult>{d}</difficult><part><name>head</name></part>"
            "<bndbox><xmin>1</xmin></bndbox></object>"
            for c, d in objects
        )
        (home / "Annotations" / f"{name}.xml").write_text(XML.format(name=name, objects=nodes))
        picture(home / "JPEGImages" / f"{name}.jpg")
    return home


def test_voc_labels_and_difficult(tmp_path):
    images = {"000005": [("chair", 0), ("chair", 1)], "000007": [("car", 1), ("dog", 0)], "000009": []}
    voc_tree(tmp_path, images)
    voc_tree(tmp_path, {"000001": [("person", 0)]}, "test")
    for option, value in (("present", 1), ("ignore", -1), ("absent", 0)):
        expected = np.zeros((3, 20), dtype=np.int8)
        expected[0, VOC.index("chair")] = 1  # one of the two chairs is easy
        expected[1, VOC.index("dog")] = 1
        expected[1, VOC.index("car")] = value
        dataset = open_dataset(f"voc2007:{tmp_path}", "train", 16, difficult=option)
        assert np.array_equal(dataset.labels, expected)
    assert open_dataset(f"voc2007:{tmp_path / 'VOCdevkit'}", "train", 16).labels[1, VOC.index("car")] == 1
    test = open_dataset(f"voc2007:{tmp_path / 'VOCdevkit' / 'VOC2007'}", "test", 16)
    assert test.ids == ["000001"]
    assert test[0][0].shape == (3, 16, 16)
    assert len(VOC) == 20
    assert sorted(VOC) == VOC


def test_voc_mistakes(tmp_path):
    refused("no ImageSets/Main", f"voc2007:{tmp_path}")
    home = voc_tree(tmp_path, {"1": [("car", 0)], "2": []})
    refused("difficult='no'", f"voc2007:{tmp_path}", difficult="no")
    (home / "Annotations" / "2.xml").write_text("<annotation><object>")
    refused("2.xml: invalid XML", f"voc2007:{tmp_path}")
    (home / "Annotations" / "2.xml").write_text("")
    refused("2.xml: the file is empty", f"voc2007:{tmp_path}")
    (home / "Annotations" / "2.xml").unlink()
    refused("2.xml: no such file", f"voc2007:{tmp_path}")
    voc_tree(tmp_path, {"1": [("unicorn", 0)]})
    refused("1.xml: object 'unicorn' is none of the 20", f"voc2007:{tmp_path}")
    (home / "ImageSets" / "Main" / "trainval.txt").write_text("1\n\n1\n")
    refused("trainval.txt, line 3: '1' is in line 1 already", f"voc2007:{tmp_path}")
    (home / "ImageSets" / "Main" / "trainval.txt").write_text("../../1\n")
    refused("trainval.txt, line 1: .*leads out", f"voc2007:{tmp_path}")


# --- VG-200 -----------------------------------------------------------------------------------------------------------


def vg_tree(root, labels, names=None):
    names = names or list(labels)
    (root / "train_list_500.txt").write_text("".join(f"{name}\n" for name in names))
    (root / "vg_category_200_labels_index.json").write_text(json.dumps(labels))
    for i, name in enumerate(labels):
        picture(root / ("VG_100K", "VG_100K_2")[i % 2] / name)
    return root


def test_vg_lists_and_both_folders(tmp_path):
    dataset = open_dataset(f"vg200:{vg_tree(tmp_path, {'9.jpg': [0, 199], '4.jpg': [5], '6.jpg': []})}", "train", 16)
    assert dataset.ids == ["9.jpg", "4.jpg", "6.jpg"]
    assert [np.flatnonzero(row).tolist() for row in dataset.labels] == [[0, 199], [5], []]
    assert dataset[[0, 1, 2]][0].shape == (3, 3, 16, 16)
    assert dataset.categories[5] == "category 5"
    (tmp_path / "vg_category_200.txt").write_text("\n".join(f"name {c}" for c in range(200)))
    assert open_dataset(f"vg200:{tmp_path}", "train", 16).categories[5] == "name 5"
    (tmp_path / "vg_category_200.txt").write_text("one\n")
    refused("has 1 names; must be 200", f"vg200:{tmp_path}")


def test_vg_mistakes(tmp_path):
    refused("train_list_500.txt: no such file", f"vg200:{tmp_path}")
    refused("line 2: '8.jpg' has no labels", f"vg200:{vg_tree(tmp_path, {'9.jpg': []}, ['9.jpg', '8.jpg'])}")
    for wrong in (200, -1, True, False, 1.5, "3", None, [0]):
        refused(r"'9.jpg' has category", f"vg200:{vg_tree(tmp_path, {'9.jpg': [wrong]})}")
    refused("line 1: .*leads out", f"vg200:{vg_tree(tmp_path, {'../9.jpg': []})}")
    vg_tree(tmp_path, {"9.jpg": []})
    (tmp_path / "VG_100K" / "9.jpg").unlink()
    refused("9.jpg: no such file", f"vg200:{tmp_path}")


def test_vg_real_lists_open_without_images(shared, tmp_path):
    names = (shared / "data" / "vg200" / "test_list_500.txt").read_text().split()
    (tmp_path / "test_list_500.txt").write_text("\n".join(names))
    index = {name: [len(name) % 200, int(name.split(".")[0]) % 200] for name in names}
    (tmp_path / "vg_category_200_labels_index.json").write_text(json.dumps(index))
    dataset = open_dataset(f"vg200:{tmp_path}", "val", 16, on_bad_image="skip")
    assert dataset.labels.shape == (10_000, 200)
    assert dataset.bad.all()


# --- CSV --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "image,cat,dog\nimg/a.png,1,0\nimg/b.png,-1,?\nimg/c.png,,1\n",
        "\ufeffimage;cat;dog\r\nimg/a.png;1;0\r\n\r\nimg/b.png;nan;-1.0\r\nimg/c.png;;1.0\r\n",
        'cat\timage\tdog\n1\timg/a.png\t0\n?\t"img/b.png"\t?\n?\timg\\c.png\t 1\n',
    ],
)
def test_csv_columns(tmp_path, text):
    dataset = open_dataset(f"csv:{csv_tree(tmp_path, text)}", "train", 16)
    assert dataset.categories == ["cat", "dog"]
    assert dataset.labels.tolist() == [[1, 0], [-1, -1], [-1, 1]]
    assert dataset.ids == ["img/a.png", "img/b.png", "img/c.png"]
    assert dataset[2][0].shape == (3, 16, 16)


@pytest.mark.parametrize(("others", "value"), [("absent", 0), ("unknown", -1)])
def test_csv_label_list(tmp_path, others, value):
    file = csv_tree(tmp_path, 'image,labels\nimg/a.png,dog; hot dog\nimg/b.png,"cat,dog"\nimg/c.png,\n')
    dataset = open_dataset(f"csv:{file}", "train", 16, others=others)
    assert dataset.categories == ["cat", "dog", "hot dog"]
    assert dataset.labels.tolist() == [[value, 1, 1], [1, 1, value], [value] * 3]
    (tmp_path / "categories.txt").write_text("dog\nhot dog\n")
    refused("line 3: category 'cat' is not in the list of categories.txt", f"csv:{file}")
    (tmp_path / "categories.txt").write_text("dog\nhot dog\ncat\nbird\n")
    assert open_dataset(f"csv:{file}", "train", 16).labels.tolist()[0] == [1, 1, 0, 0]


def test_csv_splits(tmp_path):
    rows = "image,split,labels\nimg/a.png,train,dog\nimg/b.png,val,cat\n"
    file = csv_tree(tmp_path, rows)
    for split, label in (("train", [0, 1]), ("val", [1, 0])):  # both know both categories
        assert open_dataset(f"csv:{file}", split, 16).labels.tolist() == [label]
    refused("no row has the split 'test'; there are 'train', 'val'", f"csv:{file}", "test")
    one = csv_tree(tmp_path, "image,x\nimg/a.png,1\n", "one.csv")
    refused("no column 'split'", f"csv:{one}", "val")
    csv_tree(tmp_path, "image,labels\nimg/a.png,dog\n", "train.csv")
    csv_tree(tmp_path, "image,labels\nimg/b.png,cat\n", "val.csv")
    refused("val.csv, line 2: category 'cat' is not in the list of train.csv", f"csv:{tmp_path}", "val")
    csv_tree(tmp_path, "image,cat,dog\nimg/a.png,1,0\n", "train.csv")
    csv_tree(tmp_path, "image,dog,cat\nimg/a.png,1,0\n", "val.csv")
    refused("columns are not those of train.csv", f"csv:{tmp_path}", "val")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "data.csv: the file is empty"),
        ("image,cat\n", "a header but no rows"),
        ("image,cat\nimg/a.png,yes\n", "line 2, column 'cat': 'yes' is not a label; write 1"),
        ("image,cat\nimg/a.png,2\n", "line 2, column 'cat': '2' is not a label"),
        ("image,cat\nimg/a.png,1,1\n", "line 2: 3 cells, but the header has 2"),
        ("image,cat\nimg/a.png,1\n\nimg/a.png,1\n", "line 4: 'img/a.png' is in line 2 already"),
        ("file,cat\nimg/a.png,1\n", "line 1: no column 'image'"),
        ("image,cat,cat\nimg/a.png,1,1\n", "two columns are called 'cat'"),
        ("image\nimg/a.png\n", "no categories"),
        ("image,cat,\nimg/a.png,1,\n", "column 3 has no name"),
        ("image,cat\n,1\n", "line 2: the image has no file name"),
        ("image,cat\n../a.png,1\n", "line 2: .*leads out"),
        ("image,cat\n..\\a.png,1\n", "line 2: .*leads out"),
        ("image,cat\nC:\\a.png,1\n", "line 2: .*leads out"),
        ("image,cat\n/etc/passwd,1\n", "line 2: .*leads out"),
        ("image,cat\nimg/z.png,1\n", "z.png: no such file"),
        ("image,labels\nimg/a.png,\n", "names no category at all"),
        ('image,cat\n"img/a.png,1\n', "line 2: not a CSV row"),
    ],
)
def test_csv_mistakes(tmp_path, text, match):
    refused(match, f"csv:{csv_tree(tmp_path, text)}")


@pytest.fixture(params=["csv", "pyarrow", "numpy"])
def reader(request, monkeypatch):
    """All readers of CSV files."""
    if request.param != "numpy":
        monkeypatch.setattr(csvfile, "_read_plain", lambda *a: None)
    if request.param == "csv":
        monkeypatch.setattr(csvfile, "_read_fast", lambda *a: None)
    else:
        pytest.importorskip("pyarrow")
    return request.param


def test_csv_reports_up_to_20_bad_cells_and_the_total(tmp_path, reader):
    rows = "".join(f"img/{i}.png,{'yes' if i % 2 else 1},maybe\n" for i in range(30))
    file = csv_tree(tmp_path, "image,cat,dog\n" + rows)
    with pytest.raises(DataError) as caught:
        open_dataset(f"csv:{file}", "train", 16)
    text = str(caught.value)
    assert text.startswith(f"{file}, line 2, column 'dog': 'maybe' is not a label; write 1")
    assert "45 such cells" in text
    assert text.count("column") == 20
    assert "line 3 column 'cat' 'yes'" in text
    assert text.endswith("and 25 more")


def test_csv_words_for_labels_and_splits(tmp_path, reader):
    text = "image,split,cat,dog,cow\nimg/a.png,Training,True,NA,null\nimg/b.png,validation,FALSE,n/a,1.0\n"
    file = csv_tree(tmp_path, text + "img/c.png,test,true,None,nan\n")
    assert open_dataset(f"csv:{file}", "train", 16).labels.tolist() == [[1, -1, -1]]
    assert open_dataset(f"csv:{file}", "val", 16).labels.tolist() == [[0, -1, 1]]
    assert open_dataset(f"csv:{file}", "test", 16).labels.tolist() == [[1, -1, -1]]
    file = csv_tree(tmp_path, "image,split,cat\nimg/a.png,train,1\nimg/b.png,test,0\n")
    assert open_dataset(f"csv:{file}", "val", 16).ids == ["img/b.png"]  # test, where there is no val
    one = csv_tree(tmp_path, "image,x\nimg/a.png,1\n", "one.csv")
    refused("no column 'split'.*holdout=0.2", f"csv:{one}", "val")


def test_csv_odd_files(tmp_path, reader):
    file = csv_tree(tmp_path, "image,labels\nimg/a.png,0\nimg/b.png,1\n")
    refused("holds '0' and '1', not names", f"csv:{file}")
    file = csv_tree(tmp_path, "image,cat\nimg/a.png,1\n./img/a.png,1\n")
    refused("line 3: 'img/a.png' is in line 2 already", f"csv:{file}")
    file = csv_tree(tmp_path, "image,cat\nimg//a.png,1\nimg/./a.png,1\n")
    refused("line 3: 'img/a.png' is in line 2 already", f"csv:{file}")
    file = csv_tree(tmp_path, '"image","cat"\n"img/a.png","1"\n\n,\n"img/b.png",0\n"img/zz.png",0\n')
    refused("zz.png: no such file", f"csv:{file}")
    file = csv_tree(tmp_path, '"image","cat"\n\n"img/a.png","1"\n\n,\n"img/b.png",0\n"../zz.png",0\n')
    refused("line 7: .*leads out", f"csv:{file}")
    csv_tree(tmp_path, "image,cat,dog\nimg/a.png,1,0\n", "train.csv")
    csv_tree(tmp_path, "image,labels\nimg/b.png,cat\n", "val.csv")
    refused("val.csv: lists labels, but train.csv has a column for each category", f"csv:{tmp_path}", "val")
    csv_tree(tmp_path, "image,labels\nimg/b.png,cat\n", "train.csv")
    csv_tree(tmp_path, "image,cat,dog\nimg/a.png,1,0\n", "val.csv")
    refused("val.csv: has a column for each category, but train.csv lists", f"csv:{tmp_path}", "val")


def test_csv_images_in_train_and_val_are_warned_of(tmp_path, reader):
    file = csv_tree(tmp_path, "image,split,cat\nimg/a.png,train,1\n./img/a.png,val,0\nimg/b.png,val,0\n")
    assert open_dataset(f"csv:{file}", "train", 16).warnings == []
    (warning,) = open_dataset(f"csv:{file}", "val", 16).warnings
    assert "1 images are in val and in train as well, as 'img/a.png'" in warning
    csv_tree(tmp_path, "image,cat\nimg/a.png,1\nimg/b.png,1\n", "train.csv")
    csv_tree(tmp_path, "image,cat\nimg/b.png,0\nimg/c.png,1\n", "val.csv")
    assert "'img/b.png'" in open_dataset(f"csv:{tmp_path}", "val", 16).warnings[0]


def test_csv_absolute_paths_with_root(tmp_path, reader):
    home, table = tmp_path / "photos", tmp_path / "tables"
    for name in ("a.png", "sub/b.png"):
        picture(home / name)
    picture(tmp_path / "secret.png")
    table.mkdir()
    file = table / "t.csv"
    file.write_text(f"image,cat\n{home}/a.png,1\nsub/b.png,0\n")
    refused("leads out of the dataset.*root=DIR", f"csv:{file}")
    dataset = open_dataset(f"csv:{file}", "train", 16, root=str(home))
    assert dataset.ids == ["a.png", "sub/b.png"]
    assert dataset[[0, 1]][0].shape == (2, 3, 16, 16)
    file.write_text(f"image,split,cat\n{home}/a.png,train,1\n{home}/a.png,val,0\n")
    assert "1 images are in val and in train" in open_dataset(f"csv:{file}", "val", 16, root=str(home)).warnings[0]
    for outside in (f"{tmp_path}/secret.png", f"{home}/../secret.png", "../secret.png", f"{home}x/a.png", str(home)):
        file.write_text(f"image,cat\n{outside},1\n")
        refused("leads out of the dataset", f"csv:{file}", root=str(home))
    refused("no such folder", f"csv:{file}", root=str(tmp_path / "none"))


CELLS = st.sampled_from(
    ["0", "1", "", "?", " 1", "-1", "True", "NA", "2", "x", '"1"', ' "0"', '"a"b', "1.0", "01", "-0"]
)
NUMBERS = st.sampled_from(
    ["0", "1", "", "-1", "0", "1", "", "-1", "?", "01", "0x1", "-0", "00", " 1", "1 ", " 00", "+1", "2"]
)
NAMES = st.sampled_from(
    ["a.png", " b.png", '"c.png"', '"d,e.png"', 'f"g.png', "h.png ", "", "x/../y", '"i""j.png"', "\x00"]
)


@settings(max_examples=examples(150), deadline=None)
@given(
    rows=st.lists(st.tuples(NAMES, CELLS, CELLS), max_size=6)
    | st.lists(st.tuples(st.sampled_from(["a.png", "0b.png", "01"]), NUMBERS, NUMBERS), max_size=6),
    end=st.sampled_from(["\n", "\n", "\r\n", "\n\n", "\r"]),
)
def test_csv_readers_agree(tmp_path_factory, rows, end):
    """numpy, pyarrow and the standard library: the same table, or the same error."""
    pytest.importorskip("pyarrow")
    file = tmp_path_factory.mktemp("csv") / "t.csv"
    file.write_bytes(end.join(["image,cat,dog", *(",".join(row) for row in rows), ""]).encode())

    def outcome():
        try:
            table = csvfile.read_csv(file)
            return table.texts, table.labels.tolist(), [table.line(row) for row in range(len(table))]
        except DataError as error:
            return str(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csvfile, "_BLOCK", 16)
        plain = outcome()
        patch.setattr(csvfile, "_read_plain", lambda *a: None)
        assert outcome() == plain
        patch.setattr(csvfile, "_read_fast", lambda *a: None)
        assert outcome() == plain


# --- Paths, folders, specs --------------------------------------------------------------------------------------------


def test_links_cannot_lead_out(tmp_path):
    secret, home = tmp_path / "secret", tmp_path / "home"
    picture(secret / "s.png")
    picture(home / "own.png")
    os.symlink(secret, home / "folder")
    os.symlink(secret / "s.png", home / "file.png")
    os.symlink(home / "own.png", home / "inside.png")
    os.symlink(home / "nowhere.png", home / "dangling.png")
    where = "row {}".format
    assert check_paths(home, ["own.png", "inside.png", "dangling.png", "none.png"], where) == [2, 3]
    for name in ("folder/s.png", "file.png"):
        with pytest.raises(DataError, match=r"row 0: .*a link that leads out"):
            check_paths(home, [name], where)
    for name in ("a\0b", "x/../../secret/s.png", "\\\\server\\share"):
        with pytest.raises(DataError, match="leads out"):
            check_paths(home, [name], where)
    os.symlink(home, tmp_path / "link")  # the folder itself is the user's choice
    assert check_paths(tmp_path / "link", ["own.png"], where) == []


def test_folder_for_prediction(tmp_path):
    for name in ("b.png", "sub/a.JPG", "sub/c.webp"):
        picture(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    dataset = open_dataset(f"folder:{tmp_path}", size=16)
    assert dataset.ids == ["b.png", "sub/a.JPG", "sub/c.webp"]
    assert dataset.labels.shape == (3, 0)
    images, targets, index = dataset[[0, 2]]
    assert (images.shape, targets.shape, index.tolist()) == ((2, 3, 16, 16), (2, 0), [0, 2])
    (tmp_path / "empty").mkdir()
    refused("no images in it", f"folder:{tmp_path / 'empty'}")


def test_specs(tmp_path):
    refused("'cooc:x': unknown dataset; write coco:PATH", "cooc:x")
    refused("'coco': unknown dataset", "coco")
    refused("no such file or folder", f"coco:{tmp_path / 'none'}")
    refused("option 'difficult': coco has the options year, empty", f"coco:{tmp_path}", difficult="ignore")
    refused("on_bad_image='ignore': must be raise or skip", f"coco:{coco_tree(tmp_path)}", on_bad_image="ignore")
    for size in (0, 100_000):
        with pytest.raises(DataError, match=f"size={size}: must be from 1 to 8192"):
            open_dataset("shapes", size=size)
