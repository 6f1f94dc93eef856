"""Weights on disk, in PEFT's and transformers' own formats, and LoRA adapters of other settings
than the model's.

An :class:`Adapter` is a LoRA adapter outside a model: its settings and its tensors. The functions
read one, or turn one into another that computes the same function. Only safetensors files are read,
never pickles. Which weights make up a run is decided by :class:`torchrl_llm.modules.ActorCritic`;
the trainers replace files atomically.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from torchrl_llm.modules.adapters import AdapterError, cast_outside_autocast, trainable_parameters
from torchrl_llm.modules.lm import causal_lm

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_FACTOR = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_(embedding_)?(?P<factor>[AB])(\.weight|(?P<bias>\.bias))?"
)
"""Names of LoRA's factors in files: of a linear layer, of an embedding, and of B's bias."""

# Settings of how an adapter was made or trained, which do not change what it computes.
_HISTORY = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"),
    *("corda_config", "eva_config", "init_lora_weights", "loftq_config", "lora_dropout", "lora_ga_config"),
    *("megatron_core", "runtime_config", "task_type"),
}
_TARGETS = {"target_modules", "exclude_modules", "layers_pattern", "layers_to_transform"}
_SCALES = {"r", "lora_alpha", "alpha_pattern", "rank_pattern", "use_rslora"}
# Settings that both sides may have when adapters are merged, as long as they are equal.
_COMMON = {"fan_in_fan_out", "lora_bias", "modules_to_save"}


class WeightsError(ValueError):
    """Files of weights that are missing, damaged, or of another model."""


@dataclass(frozen=True)
class Adapter:
    """One LoRA adapter outside a model.

    Attributes:
        config: its settings.
        tensors: its tensors, under the names that PEFT gives them in files.
    """

    config: LoraConfig
    tensors: Mapping[str, Tensor]

    @cached_property
    def factors(self) -> dict[str, dict[str, Tensor]]:
        """The factors ``"A"`` and ``"B"`` of each module that the adapter changes."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, value in self.tensors.items():
            if (match := _FACTOR.fullmatch(name)) and not match["bias"]:
                found.setdefault(match["module"], {})[match["factor"]] = value
        return found

    @property
    def ranks(self) -> dict[str, int]:
        """The rank of each module that the adapter changes."""
        return {module: len(factors["A"]) for module, factors in self.factors.items() if "A" in factors}

    def scaling(self, module: str) -> float:
        """The factor of B A in the update of ``module``."""
        config = self.config
        rank = config.rank_pattern.get(get_pattern_key(list(config.rank_pattern), module), config.r)
        alpha = config.alpha_pattern.get(get_pattern_key(list(config.alpha_pattern), module), config.lora_alpha)
        return alpha / (math.sqrt(rank) if config.use_rslora else rank)


# Files.


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, on the CPU.

    Raises:
        WeightsError: there is no such file, or it is damaged.
    """
    if not file.is_file():
        pickles = [found.name for found in file.parent.glob("*.bin")]
        hint = f" Pickles ({', '.join(pickles)}) are not read: convert them to safetensors." if pickles else ""
        raise WeightsError(f"{file} does not exist.{hint}")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise WeightsError(f"{file} is damaged: {error}") from error


def read_adapter(path: Path) -> Adapter:
    """The LoRA adapter in the folder ``path``.

    Raises:
        WeightsError: the folder does not hold one.
    """
    if not holds_adapter(path):
        whole = " It holds the weights of a whole model: pass it as the model (model_path) instead."
        raise WeightsError(f"{path} holds no LoRA adapter: it has no {_CONFIG}.{whole if has_weights(path) else ''}")
    try:
        config = PeftConfig.from_pretrained(str(path))
        for name in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"):
            patterns = getattr(config, name, None) or ()
            for pattern in [patterns] if isinstance(patterns, str) else patterns:
                re.compile(pattern)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, re.error) as error:
        raise WeightsError(
            f"{path / _CONFIG} is not a file of PEFT, or is damaged: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(config, LoraConfig):
        raise WeightsError(f"{path / _CONFIG} has peft_type {config.peft_type!r}; expected 'LORA'.")
    if config.megatron_config is not None:  # PEFT imports the module that megatron_core names then
        raise WeightsError(f"{path / _CONFIG} has a megatron_config; expected an adapter of a transformers model.")
    return Adapter(config, read_tensors(path / _TENSORS))


def read_model(path: Path, model: Any) -> dict[str, Tensor]:
    """The weights in the folder ``path`` under the names of ``model``, a transformers model.

    Raises:
        WeightsError: they are missing, damaged, of a LoRA adapter, or of another model.
    """
    if holds_adapter(path):
        raise WeightsError(
            f"{path} holds a LoRA adapter, but the model here has none. Give load_actor_critic the LoRA settings in "
            f"its {_CONFIG}."
        )
    if not path.is_dir():  # from_pretrained would take it for a hub id
        raise WeightsError(f"{path} does not exist.")
    _check_index(path / "model.safetensors.index.json")
    try:
        # Not load_file: transformers renames and stacks what a checkpoint has under other names
        # (experts of mixtures).
        loaded, info = type(model).from_pretrained(
            path, dtype=model.dtype, use_safetensors=True, output_loading_info=True, local_files_only=True
        )
    except (OSError, SafetensorError, RuntimeError) as error:
        raise WeightsError(f"The weights in {path} cannot be read: {error}") from error
    # transformers initializes them at random, with a warning.
    if info["missing_keys"]:
        raise WeightsError(f"The weights in {path} lack {sorted(info['missing_keys'])}.")
    tensors = loaded.state_dict()
    check_shapes(tensors, model.state_dict(), f"The weights in {path} are of another model", WeightsError)
    return tensors


def _check_index(index: Path) -> None:
    """Refuse shards that are not safetensors files: transformers would read them as pickles."""
    if not index.is_file():
        return
    try:
        files = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{index} is damaged: {error}") from error
    pickles = sorted(str(file) for file in files if not str(file).endswith(".safetensors"))
    if pickles:
        raise WeightsError(f"{index} names {pickles}: pickles are not read; convert them to safetensors.")


def holds_adapter(path: Path) -> bool:
    """Whether the folder ``path`` holds a LoRA adapter, and not a whole model."""
    return (path / _CONFIG).is_file()


def has_weights(path: Path) -> bool:
    """Whether the folder ``path`` holds a LoRA adapter or a whole model."""
    return holds_adapter(path) or (path / "config.json").is_file()


# Adapters in a model.


def adapter_of(model: PeftModel, name: str) -> Adapter:
    """The adapter ``name`` of ``model``; its tensors are the model's own."""
    # save_embedding_layers="auto", the default, may ask the hub for the configuration of the base.
    tensors = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return Adapter(model.peft_config[name], tensors)


def set_adapter_tensors(model: PeftModel, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Copy ``tensors`` into the adapter ``name`` of ``model``, whose parameters and dtypes stay.

    Raises:
        AdapterError: the adapter has other tensors.
    """
    own = adapter_of(model, name).tensors
    check_shapes(tensors, own, f"The tensors do not fit the adapter {name!r}", AdapterError)
    set_peft_model_state_dict(model, dict(tensors), adapter_name=name)


def load_adapters(model: PeftModel, sources: Mapping[str, Path], *, merge: bool = False) -> None:
    """Read LoRA adapters into ``model``.

    Args:
        model: has the adapters already; all of them have the same settings.
        sources: adapter name -> folder to read.
        merge: reconcile other settings: every adapter of ``model``, read or not, gets the largest
            rank and the union of the target modules, and still computes what it did. Where the
            model's own settings cover the ones in the files, they stay as they are.

    Raises:
        WeightsError: a folder does not hold a LoRA adapter.
        AdapterError: the settings differ and ``merge`` is false, or they differ in what cannot be
            merged; or the adapter is of another base model. The model is unchanged then.
    """
    # All are read and checked before the first is changed: an error leaves the model as it is.
    found, covered = {name: read_adapter(path) for name, path in sources.items()}, True
    for name, adapter in found.items():
        live = adapter_of(model, name)
        equal = _check_settings(adapter, live, sources[name], merge=merge)
        _check_base(model, adapter, live, sources[name], equal_settings=equal)
        ranks = live.ranks
        covered &= all(rank <= ranks.get(module, 0) for module, rank in adapter.ranks.items())
    if not covered:
        _rebuild(model, _merged_config(model, found))
    for name, adapter in found.items():
        set_adapter_tensors(model, name, fit_adapter(adapter, adapter_of(model, name)))


def fit_adapter(source: Adapter, target: Adapter) -> dict[str, Tensor]:
    """Tensors of the names and shapes of ``target``'s with which it computes the function of
    ``source``.

    With factors A ``[r, in]`` and B ``[out, r]`` and scaling s, an adapter adds s B A. A larger
    rank gets columns of zeros in B, and keeps ``target``'s rows in A: rows of zeros in both could
    never be trained. The quotient of the two scalings goes into B.

    Args:
        source: changes no module that ``target`` does not, and none with a larger rank.
        target: where the tensors will go.
    """
    fitted = {}
    for name, slot in target.tensors.items():
        value, match = source.tensors.get(name), _FACTOR.fullmatch(name)
        if match is None:
            fitted[name] = slot if value is None else value
            continue
        fitted[name] = slot.clone() if match["factor"] == "A" else torch.zeros_like(slot)
        if value is not None:
            module = match["module"]
            ratio = 1.0 if match["factor"] == "A" else source.scaling(module) / target.scaling(module)
            fitted[name][tuple(map(slice, value.shape))] = value.to(slot) * ratio
    return fitted


def _merged_config(model: PeftModel, found: Mapping[str, Adapter]) -> LoraConfig:
    """The live settings with the largest rank, every target, and the scaling that the live settings
    have."""
    live = [adapter_of(model, name) for name in model.peft_config]
    ranks = [each.ranks for each in (*live, *found.values())]
    config: LoraConfig = copy.deepcopy(live[0].config)
    rank = max(max(each.values()) for each in ranks)
    growth = rank / config.r
    alpha = config.lora_alpha * (math.sqrt(growth) if config.use_rslora else growth)
    config.r, config.lora_alpha = rank, int(alpha) if alpha == int(alpha) else alpha
    # Full names, so no other setting may narrow them down.
    config.target_modules = {module for each in ranks for module in each}
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    config.rank_pattern, config.alpha_pattern = {}, {}
    return config


def _rebuild(model: PeftModel, config: LoraConfig) -> None:
    """Give every adapter of ``model`` the settings ``config``, which cover its own, and leave its
    function."""
    before = {name: copy.deepcopy(adapter_of(model, name)) for name in model.peft_config}
    trained = [name for name in before if trainable_parameters(model, name)]
    active, spare = model.active_adapter, "spare"
    with torch.random.fork_rng(devices=[]):
        # PEFT draws factors, and rows of A beyond the old rank keep them: alike in every process.
        torch.default_generator.manual_seed(0)
        model.add_adapter(spare, copy.deepcopy(config))  # PEFT cannot do without any adapter
        model.set_adapter(spare)
        for name in before:
            model.delete_adapter(name)
            model.add_adapter(name, copy.deepcopy(config))
    model.set_adapter(active)
    model.delete_adapter(spare)
    for name, adapter in before.items():
        set_adapter_tensors(model, name, fit_adapter(adapter, adapter_of(model, name)))
    # The calls above switch flags: PEFT lets the active adapter train, and no other.
    model.set_requires_grad(trained, True)
    model.train(model.training)  # new layers start in training mode
    cast_outside_autocast(model)


# Errors.


def _check_settings(found: Adapter, live: Adapter, path: Path, *, merge: bool) -> bool:
    """Whether both compute the same function of their tensors; an error if they do not and cannot
    be reconciled."""
    theirs, ours = _settings(found.config), _settings(live.config)
    same_modules = found.ranks.keys() == live.ranks.keys()
    different = {field for field in ours if theirs[field] != ours[field] and not (same_modules and field in _TARGETS)}
    if different and not merge:
        raise AdapterError(
            f"The LoRA settings of {path} are not those of the model here:\n{_listed(different, theirs, ours)}\n"
            "Use the settings of its adapter_config.json, or pass merge_lora_configs=True."
        )
    default = _settings(LoraConfig())
    rest = {field for field in ours if field not in _TARGETS | _SCALES}
    impossible = different & rest
    if different:
        impossible |= {f for f in rest - _COMMON if not theirs[f] == ours[f] == default[f]}
    if impossible:
        raise AdapterError(
            f"merge_lora_configs=True reconciles ranks, scalings and target modules, but {path} and the model here "
            f"have settings that cannot be merged:\n{_listed(impossible, theirs, ours)}"
        )
    return not different


def _settings(config: LoraConfig) -> dict[str, Any]:
    """The settings on which an adapter's function depends; unordered collections sorted, empty ones
    as None."""

    def plain(value: Any) -> Any:
        if isinstance(value, set | list | tuple):
            return sorted(value, key=str) or None
        return value if value != {} else None

    return {field.name: plain(getattr(config, field.name)) for field in fields(config) if field.name not in _HISTORY}


def _listed(names: set[str], theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    return "\n".join(f"  {name}: {theirs[name]!r} there, {ours[name]!r} here" for name in sorted(names))


def _check_base(model: PeftModel, found: Adapter, live: Adapter, path: Path, *, equal_settings: bool) -> None:
    """Refuse adapters of another base model."""
    what = f"The adapter in {path} is of another base model"
    modules: dict[str, Any] = dict(causal_lm(model).named_modules())
    for name, factors in sorted(found.factors.items()):
        if name not in modules:
            raise AdapterError(f"{what}: the one here has no module {name!r}.")
        if len(factors) < 2:
            raise WeightsError(f"The adapter in {path} lacks one of the factors of {name!r}.")
        theirs, ours = (factors["A"].shape[1], factors["B"].shape[0]), _sizes(modules[name])
        if ours not in (None, theirs):
            raise AdapterError(f"{what}: {name!r} has sizes {theirs} there, {ours} here.")

    # Factors may differ under different settings, anything else (modules_to_save) never.
    def fixed(adapter: Adapter) -> dict[str, Tensor]:
        return {name: x for name, x in adapter.tensors.items() if equal_settings or not _FACTOR.fullmatch(name)}

    check_shapes(fixed(found), fixed(live), what, AdapterError)


def _sizes(module: Any) -> tuple[int, int] | None:
    """The inputs and outputs of a module, where they are known."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    return (module.in_features, module.out_features) if hasattr(module, "in_features") else None


def check_shapes(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor], what: str, error: type[ValueError]) -> None:
    """Raise ``error`` with a message that begins with ``what`` unless both have the same names and
    shapes."""
    shapes = [{name: tuple(value.shape) for name, value in each.items()} for each in (theirs, ours)]
    wrong = sorted(name for name in shapes[0].keys() | shapes[1].keys() if shapes[0].get(name) != shapes[1].get(name))
    if wrong:
        raise error(
            f"{what}: for example {wrong[0]} has shape {shapes[0].get(wrong[0])} there and {shapes[1].get(wrong[0])} here."
        )
