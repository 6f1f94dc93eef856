"""The settings of a run that have an effect, with the values that they have:
:func:`effective_settings`.

Two runs are of one setting if these are equal. They come from the settings file, from the loss and
the estimator that the run really has, and from what was given in Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchrl_llm.objectives import TurnLoss
from torchrl_llm.runs.config import HOW_TO_RUN, RunSettings, shown_default
from torchrl_llm.runs.identity import names_of_parts
from torchrl_llm.runs.loss_settings import NO_ACTOR, NO_CRITIC
from torchrl_llm.runs.settings import OutputSettings, names_of
from torchrl_llm.utils.fingerprint import fingerprint
from torchrl_llm.utils.options import ConfigError, Idle, options_of
from torchrl_llm.utils.sections import rules_of

_NO_EFFECT = (*HOW_TO_RUN, "max_tokens")
"""Settings that change no number of a run, but for rounding: ``max_tokens`` bounds memory."""

_OUTPUTS = set(names_of(OutputSettings)) - {"callbacks"}

_PARTS = (
    *("actor", "critic", "joint", "estimator", "single_turn", "partial", "process_group"),
    *("value_network", "value_chunk_size"),
)
"""Parameters of losses and estimators that are not options, or change no number."""


def effective_settings(config: RunSettings, loss: TurnLoss | None = None) -> dict[str, Any]:
    """The settings that have an effect on the numbers of a run, by name.

    Args:
        config: the settings as given.
        loss: the run's, with its estimator; default: the one of the settings.

    Returns:
        Name -> value. An option of the loss or the estimator has the value that these objects have,
        also where the loss was given in Python, for the defaults depend on each other. Options
        that are not settings are there if they are not their class's default, and ``"loss"`` and
        ``"estimator"`` as classes, if they are not the algorithm's own.

    Examples:
        >>> settings = effective_settings(RunSettings.from_values(granularity="token"))
        >>> settings["gamma"], "sampler_level" in settings, "group_size" in settings
        (1.0, False, True)
    """
    loss = config.make_loss(NO_ACTOR, NO_CRITIC) if loss is None else loss
    settings = config.values()
    left_out = {*_NO_EFFECT, *vars(config.loss)} - {"loss_class", "loss_options", "estimator", "estimator_options"}
    values = {name: value for name, value in settings.items() if name not in left_out}
    values |= {name: each.value for name, each in _options(loss).items() if name in settings or each.is_changed}
    for name in ("loss_options", "estimator_options"):  # most are attributes, and there already
        rest = {option: value for option, value in values.pop(name).items() if option not in values}
        values |= {name: rest} if rest else {}
    if type(loss) is not config.loss.loss_type():
        values["loss"] = named(type(loss))
    if config.loss.estimator is None and type(loss.value_estimator) is not loss.default_value_estimator:
        values["estimator"] = named(type(loss.value_estimator))
    # which may be TorchRL's own
    rules = (*rules_of(RunSettings), *loss.idle, *getattr(loss.value_estimator, "idle", ()))
    idle = {name for rule in rules if _is_met(rule, values) for name in rule.names if _is_harmless(config, name, rule)}
    return {name: value for name, value in sorted(values.items()) if name not in idle}


class _Value(NamedTuple):
    """The value of an option, and its default in the class that has it."""

    value: Any
    default: Any

    @property
    def is_changed(self) -> bool:
        return as_text(self.value) != as_text(self.default)  # arrays have no plain comparison


def _options(loss: TurnLoss) -> dict[str, _Value]:
    """The options of a loss and its estimator. Of what both have the estimator decides, but for the
    weight of the KL."""
    values, deciding = _own_options(loss), _own_options(loss.value_estimator)
    if "kl_coeff" in values and "kl_coeff" in deciding:
        further = deciding.pop("kl_coeff")
        if further.value not in (0, values["kl_coeff"].value):  # 0: the KL is in the loss
            values["estimator.kl_coeff"] = further
    return values | deciding


def _own_options(part: Any) -> dict[str, _Value]:
    options = {name: option for name, option in options_of(type(part)).items() if name not in _PARTS}
    values = {name: getattr(part, name) for name in options if hasattr(part, name)}
    # TorchRL's estimators have gamma and lmbda as tensors.
    scalars = {n: value.item() for n, value in values.items() if isinstance(value, torch.Tensor) and value.ndim == 0}
    return {name: _Value(value, options[name].default) for name, value in {**values, **scalars}.items()}


def _is_met(rule: Idle, values: Mapping[str, Any]) -> bool:
    return all(name in values and as_text(values[name]) in map(as_text, under) for name, under in rule.under.items())


def _is_harmless(config: RunSettings, name: str, rule: Idle) -> bool:
    """Whether an idle setting is not given, or asks for what happens anyway; any other is refused,
    so that it is not idle."""
    # a rule of a loss also names options that are not settings
    option = config.options().get(name)
    return option is None or config.values()[name] in (option.default, rule.harmless.get(name, option.default))


def changed_settings(config: RunSettings, loss: TurnLoss | None = None) -> dict[str, list[str]]:
    """The settings that are not the defaults: name -> value and default as text.

    The default of an option of the loss is the one that it has beside the other settings. Options
    that are not settings, of a loss that was given in Python, count too.

    Examples:
        >>> changed_settings(RunSettings.from_values(granularity="token", gamma=0.9))
        {'gamma': ['0.9', '1.0'], 'granularity': ['token', 'turn']}
    """
    options = config.options()
    others = {name: value for name, value in config.values().items() if name not in {*_OUTPUTS, *vars(config.loss)}}
    changed = {name: value for name, value in others.items() if value != options[name].default} | config.loss.changed()
    pairs = {name: _Value(value, _default(config, name)) for name, value in sorted(changed.items())}
    if loss is not None:
        pairs |= {name: each for name, each in _options(loss).items() if name not in options}
    return {name: [str(each.value), str(each.default)] for name, each in pairs.items() if each.is_changed}


def _default(config: RunSettings, name: str) -> Any:
    if name not in vars(config.loss):
        return config.options()[name].default
    default = config.loss.defaults()[name]
    try:
        return _options(config.replace(**{name: default}).make_loss(NO_ACTOR, NO_CRITIC))[name].value
    except (ConfigError, KeyError):  # another setting needs it, or only another loss has it
        return shown_default(name, config.algo)


def python_settings(**parts: Any) -> dict[str, str]:
    """What a run was given in Python, as settings: name -> names of the objects, and a fingerprint
    of what they hold.

    Args:
        parts: arguments of ``build_run``; ``None`` or empty: not given.

    Examples:
        >>> python_settings(env=dict, make_loss=None, callbacks=[])
        {'env': 'builtins:dict #70936ea623473ddd'}
    """
    given = {name: part for name, part in parts.items() if part is not None and part != () and part != []}
    return {name: named(part) for name, part in given.items()}


def named(part: Any) -> str:
    """The name of an object that was given in Python, and its fingerprint."""
    (name,) = names_of_parts(part=part).values()
    return f"{name} #{fingerprint(part)}"


def as_text(value: Any) -> str:
    """A value of a setting as text, the same for equal values: 1 and 1.0, lists and tuples,
    mappings in any order.

    Examples:
        >>> as_text(1.0), as_text((0.2, 1)), as_text({"b": True, "a": None})
        ('1', '[0.2, 1]', '{a: None, b: True}')
    """
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{key}: {as_text(each)}' for key, each in value.items()))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_text, value))}]"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value) if isinstance(value, str | int | float | Path | None) else named(value)
