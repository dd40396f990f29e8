"""Categories of images with an exported model. It needs numpy, Pillow and onnxruntime, no torch.

gpu-logicmix export runs/photos --to onnx --out photos.onnx
python examples/onnx_predict.py photos.onnx photos/img/0.png photos/img/1.png
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image

session = onnxruntime.InferenceSession(sys.argv[1])
about = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
for name in sys.argv[2:]:
    image = Image.open(name).convert("RGB").resize(about["input"]["size"], Image.Resampling.BILINEAR)
    pixels = np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 255  # mean and std are in the model
    (probabilities,) = session.run(["probabilities"], {"images": pixels[None]})[0]
    for category, probability, threshold in zip(about["categories"], probabilities, about["thresholds"], strict=True):
        print(f"{name}\t{category}\t{probability:.4f}\t{'yes' if probability > threshold else 'no'}")
