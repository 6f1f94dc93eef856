"""The settings of :class:`~torchrl_llm.modules.HFPolicy` in a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchrl_llm.modules.engine_settings import EngineSettings

ATTENTION = ("eager", "sdpa")
"""PyTorch's own implementations of attention, which take masks; transformers may fetch the code of
others."""


@dataclass(kw_only=True)
class HFSettings(EngineSettings):
    """The trained model itself (transformers)."""

    known_as = "hf"
    owns_weights = False
    description = "transformers (HFPolicy)"
    harmless: ClassVar[Mapping[str, Any]] = {"compile_decode": False}
    not_sharded: ClassVar[Mapping[str, Any]] = {"compile_decode": ((True,), "false, or DDP")}

    compile_decode: bool = False
    """torch.compile the forward of a sampled token, in the first turn of a run; changes results by
    rounding only. Not tried on a GPU; on a CPU it needs a C++ compiler."""

    def problems(self, config: Any) -> Iterator[str]:
        if config.model.attn_implementation not in (None, *ATTENTION):
            yield (
                f"attn_implementation={config.model.attn_implementation!r} takes no mask, and policy='hf' samples with one: leave it out. "
                "PyTorch's own attention (sdpa), which is the default, runs flash attention on a GPU too, and computes what rows "
                "share once."
            )
