"""The settings of :mod:`third_engine`, beside the engine as the package's own have them."""

from dataclasses import dataclass
from typing import Literal

from torchrl_llm.modules.engine_settings import EngineSettings


@dataclass(kw_only=True)
class ThirdSettings(EngineSettings):
    """A third engine."""

    known_as = "third"
    description = "a third engine"
    requires = ("no-such-package",)
    memory_settings = ("third_share", "third_gpus")

    third_kind: Literal["ThirdEngine", "Deaf"] = "ThirdEngine"
    """Its class."""

    def problems(self, config):
        if config.collector == "self_play":
            yield "a third engine plays alone."

    def checks(self):
        yield "third_kind", lambda: f"it is a {self.third_kind}"

    def make_policy(self, config, path, tokenizer, sampling, *, device, processes=1):
        # It imports what imports the settings.
        from third_engine import load

        return load(path, tokenizer, sampling, seed=config.trainer.seed, kind=self.third_kind)

    def memory(self, config, device, card=None):
        return 2**18 if device.type == "cuda" else 0
