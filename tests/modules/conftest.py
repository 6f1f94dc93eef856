"""Where the models of these tests are."""

import pytest
from places import device

from torchrl_llm.modules import load_actor_critic


@pytest.fixture(autouse=True)
def on_the_pretended_gpu(monkeypatch):
    """Models that are told no device are on the pretended GPU, where its plugin runs the tests."""
    if device() != "cpu":
        monkeypatch.setitem(load_actor_critic.__kwdefaults__, "device", device())
