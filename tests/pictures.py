"""Pictures for tests of augmentation."""

import torch


def made_up(height=64, width=50):
    """Random, constant, black, white, contrast of one pixel and of one level, a ramp."""
    generator = torch.Generator().manual_seed(1)
    images = torch.zeros(8, 3, height, width, dtype=torch.uint8)
    images[0] = torch.randint(256, (3, height, width), generator=generator)
    images[1] = torch.tensor([40, 128, 200])[:, None, None]
    images[3] = 255
    images[4] = 100
    images[4, :, 3, 5] = 101
    images[5, :, height // 2, width // 2] = 255
    images[6] = torch.arange(width) * 255 // (width - 1)
    images[7] = torch.randint(90, 110, (3, height, width), generator=generator)
    return images
