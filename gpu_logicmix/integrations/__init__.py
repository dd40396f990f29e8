"""The mixes in the places that other training frameworks have for them. Each file needs its framework."""

from gpu_logicmix.integrations.batches import mix_batch

__all__ = ["mix_batch"]
