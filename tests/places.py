"""Where tests compute: :func:`device`."""

import torch


def device() -> str:
    """The CPU; the pretended GPU where its plugin for pytest runs the tests."""
    return "cuda" if torch.cuda.is_available() and torch.cuda.get_device_name().startswith("pretended") else "cpu"
