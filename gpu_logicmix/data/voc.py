"""Pascal VOC 2007 and 2012: ImageSets/Main/{train,val,trainval,test}.txt, Annotations/*.xml, JPEGImages/*.jpg."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from gpu_logicmix.data.files import Listing, check_choice, check_paths, read_names
from gpu_logicmix.data.table import both_warning
from gpu_logicmix.errors import DataError
from gpu_logicmix.files import read_text

CATEGORIES = ["aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"]
CATEGORIES += [
    "diningtable",
    "dog",
    "horse",
    "motorbike",
    "person",
    "pottedplant",
    "sheep",
    "sofa",
    "train",
    "tvmonitor",
]


def list_voc2007(root: Path, split: str, *, difficult: str = "present") -> Listing:
    """split: "train" is VOC's trainval and "val" (or "test") its test, as in all papers on partial labels.
    difficult: what a category is of which all objects are marked difficult: "present"; "ignore" makes it unknown;
        "absent" is what the SST and SARB code does.
    """
    check_choice("split", split, ("train", "trainval", "val", "test"))
    return _list(root, "VOC2007", "trainval" if split.startswith("train") else "test", "trainval", difficult)


def list_voc2012(root: Path, split: str, *, difficult: str = "present") -> Listing:
    """split: "train" or "val", or "trainval"; the labels of the test images were never published.
    difficult: as for voc2007.
    """
    check_choice("split", split, ("train", "val", "trainval"))
    return _list(root, "VOC2012", split, "train", difficult)


def _list(root: Path, year: str, part: str, trained: str, difficult: str) -> Listing:
    check_choice("difficult", difficult, ("present", "ignore", "absent"))
    for home in (root, root / year, root / "VOCdevkit" / year):
        if (home / "ImageSets" / "Main").is_dir():
            break
    else:
        raise DataError(f"{root}: no ImageSets/Main in it, nor in {year} or VOCdevkit/{year} below it")
    names_file, train_file = (home / "ImageSets" / "Main" / f"{name}.txt" for name in (part, trained))
    lines = read_names(names_file)
    names = list(lines)
    warnings = []
    if train_file != names_file and part != "trainval" and train_file.exists():
        warnings = both_warning(read_names(train_file).keys() & lines.keys(), names_file, part)
    where = lambda i: f"{names_file}, line {lines[names[i]]}"  # noqa: E731
    images = [f"{name}.jpg" for name in names]
    missing = check_paths(home / "JPEGImages", images, where)  # also keeps the names of the XML files inside
    labels = np.zeros((len(names), len(CATEGORIES)), dtype=np.int8)
    only_difficult = {"present": 1, "ignore": -1, "absent": 0}[difficult]
    for row, name in enumerate(names):
        file = home / "Annotations" / f"{name}.xml"
        objects = _objects(file)
        for category in {category for category, _ in objects}:
            if category not in CATEGORIES:
                raise DataError(f"{file}: object {category!r} is none of the 20 categories of VOC; correct the name")
            easy = any(c == category and not is_difficult for c, is_difficult in objects)
            labels[row, CATEGORIES.index(category)] = 1 if easy else only_difficult
    return Listing(home / "JPEGImages", images, names, labels, CATEGORIES, missing, warnings)


def _objects(file: Path) -> list[tuple[str, bool]]:
    """(category, difficult) of each object in an annotation file."""
    try:
        tree = ElementTree.fromstring(read_text(file))
    except ElementTree.ParseError as error:
        raise DataError(f"{file}: invalid XML ({error}); was it unpacked to the end?") from None
    objects = []
    for number, node in enumerate(tree.iter("object"), 1):
        category = (node.findtext("name") or "").strip()
        if not category:
            raise DataError(f"{file}: object {number} has no name")
        objects.append((category, (node.findtext("difficult") or "0").strip() == "1"))
    return objects
