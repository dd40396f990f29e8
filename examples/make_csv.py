"""A folder of images with a CSV of partial labels, to try the quickstart with: 300 drawn shapes, 4 categories.

python examples/make_csv.py photos
"""

import csv
import sys
from pathlib import Path

from PIL import Image

from gpu_logicmix import hide_labels, open_dataset

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "photos")
(folder / "img").mkdir(parents=True, exist_ok=True)
dataset = open_dataset("shapes", "train", size=64, count=300)
categories = dataset.categories[:4]
labels = hide_labels(dataset.labels[:, :4], known=0.5)  # half of the cells become -1, unknown

with open(folder / "labels.csv", "w", newline="", encoding="utf-8") as file:
    table = csv.writer(file)
    table.writerow(["image", *categories])
    for row, known in enumerate(labels.tolist()):
        image, _, _ = dataset[row]
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / "img" / f"{row}.png")
        table.writerow([f"img/{row}.png", *("" if label == -1 else label for label in known)])

print(f"{folder}: {len(labels)} images, {', '.join(categories)}, half of the labels unknown")
