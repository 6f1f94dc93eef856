"""LoRA adapters on a base model: adding them, choosing the one that a forward runs under
(:func:`use_adapter`), fusing one.

Gradient checkpointing recomputes under the adapter that its forward ran under.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear, LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from torchrl_llm.modules.checks import FAILURES, run_once
from torchrl_llm.modules.kernels import attention_kernels
from torchrl_llm.modules.lm import backbone, causal_lm, outer_modules

_MAX_FUSED_BYTES = 2**26  # 64 MiB: every layer of a small model; see FusedLora

State = tuple[list[str], bool]
"""The active adapters of one PEFT layer, and whether adapters are off."""


class AdapterError(ValueError):
    """A LoRA adapter that the model does not have, or that does not fit it."""


class LoraTargetError(ValueError):
    """The LoRA settings name modules that the model does not have, or break what adapters are used
    for here."""


def adapter_layers(model: nn.Module) -> list[Any]:
    """The PEFT layers of ``model``: each holds every adapter's weights and the name of the active
    one.

    Nested ones too, outermost first: a module with several adapted parameters (the experts of a
    mixture) is wrapped once for each, and every wrapper is switched by itself.
    """
    kinds = BaseTunerLayer | AuxiliaryTrainingWrapper
    return [module for module in outer_modules(model) if isinstance(module, kinds)]


@contextmanager
def use_adapter(model: nn.Module, adapter: str | None) -> Iterator[nn.Module]:
    """Run forwards under one LoRA adapter, and put back what was active before.

    PEFT's own ``set_adapter`` and ``disable_adapter`` also switch ``requires_grad``; a leaf whose
    flag is off when ``backward`` runs loses its gradient silently. Here every parameter keeps its
    flag, so the losses of several adapters can be summed and differentiated together.

    With two adapters on all 168 linear layers of a model of 24 layers, there and back take 0.2 ms
    of one CPU core where the adapter is the active one already, else 8 ms, most of them PEFT's, for
    setting flags. That grows with the number of layers, not with their width.

    With gradient checkpointing, switch it on by :func:`enable_gradient_checkpointing`, else the
    recomputation runs under whatever adapter is active when ``backward`` is called.

    Args:
        model: a module with PEFT layers somewhere inside, or a plain one.
        adapter: the adapter's name. ``None``: the base model, adapters off; nothing to do for a
            plain module.

    Yields:
        ``model``.

    Raises:
        AdapterError: the model has no such adapter, or another one is merged into its weights.

    Examples:
        >>> import torch
        >>> with use_adapter(torch.nn.Linear(2, 2), None) as model:
        ...     y = model(torch.zeros(1, 2))
        >>> with use_adapter(torch.nn.Linear(2, 2), "actor"):
        ...     pass
        Traceback (most recent call last):
            ...
        torchrl_llm.modules.adapters.AdapterError: The adapter 'actor' was asked for, but Linear has no LoRA adapters...
    """
    layers = check_adapter(model, adapter)
    with _switched(layers, [_wanted(layer, adapter) for layer in layers]):
        yield model


def enable_gradient_checkpointing(model: nn.Module) -> None:
    """Recompute each block's activations in ``backward``, under the adapter that its forward ran
    under.

    Non-reentrant checkpointing of :mod:`torch.utils.checkpoint`; transformers applies it in
    training mode only (``model.train()``).

    Args:
        model: a transformers model or a ``PeftModel`` around one.
    """
    lm = causal_lm(model)
    # transformers renames this method in the 5.x series; the old name warns where the new one
    # exists.
    enable = getattr(lm, "activation_checkpointing_enable", None) or lm.gradient_checkpointing_enable
    # Reentrant checkpointing takes no context_fn.
    enable({"use_reentrant": False, "context_fn": lambda: recompute_contexts(model)})


def recompute_contexts(model: nn.Module) -> tuple[AbstractContextManager, AbstractContextManager]:
    """The ``context_fn`` of :func:`torch.utils.checkpoint.checkpoint`: the recomputation runs under
    the adapter active now, and with the attention kernels of the forward
    (:func:`~torchrl_llm.modules.kernels.attention_kernels`)."""
    layers = adapter_layers(model)
    return nullcontext(), _recomputation(layers, [_state(layer) for layer in layers])


def _state(layer: Any) -> State:
    return list(layer.active_adapters), layer.disable_adapters


def _wanted(layer: Any, adapter: str | None) -> State:
    if adapter is None:
        return list(layer.active_adapters), True
    # Copies of modules (modules_to_save) and trained tokens refuse the name of an adapter that they
    # do not have; LoRA layers skip it.
    held = isinstance(layer, LoraLayer) or adapter in available_adapters(layer)
    return [adapter] if held else [], False


@contextmanager
def _switched(layers: Sequence[Any], states: Sequence[State]) -> Iterator[None]:
    """Give each layer its state, and put back the old one afterwards."""
    changes = [(layer, state) for layer, state in zip(layers, states, strict=True) if _state(layer) != state]
    before = [(layer, _state(layer)) for layer, _ in changes]
    try:
        _switch(changes)
        yield
    finally:
        _switch(before)


@contextmanager
def _recomputation(layers: Sequence[Any], states: Sequence[State]) -> Iterator[None]:
    """As :func:`_switched`, but each layer at its first forward: a recomputation runs one block,
    with few of the layers. With the attention kernels of the forward."""
    changes = {id(layer): (layer, state) for layer, state in zip(layers, states, strict=True) if _state(layer) != state}
    with attention_kernels(), ExitStack() as stack:

        def switch(module: nn.Module, _: Any) -> None:
            if id(module) in changes:
                layer, state = changes.pop(id(module))
                stack.enter_context(_switched([layer], [state]))

        if changes:
            stack.callback(register_module_forward_pre_hook(switch).remove)
        yield


def _switch(changes: Sequence[tuple[Any, State]]) -> None:
    # Listed here and not once for both ways: a forward of sharded weights may leave other
    # parameters than it found.
    parameters = [p for layer, _ in changes for weights in _weights_by_adapter(layer) for p in weights.parameters()]
    flags = [parameter.requires_grad for parameter in parameters]
    try:
        for layer, (active, disabled) in changes:
            if active != layer.active_adapters:
                layer.set_adapter(active)
            if disabled != layer.disable_adapters:
                layer.enable_adapters(not disabled)
    finally:
        for parameter, flag in zip(parameters, flags, strict=True):
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)


def _weights_by_adapter(layer: Any) -> Iterator[nn.ModuleDict | nn.ParameterDict]:
    """The containers of a PEFT layer's weights that are not empty, each keyed by adapter."""
    for name in layer.adapter_layer_names:
        found = attrgetter(name)(layer)
        if isinstance(found, nn.ModuleDict | nn.ParameterDict) and len(found):
            yield found


def available_adapters(layer: Any) -> set[str]:
    """The adapters that a PEFT layer has weights of."""
    return {name for weights in _weights_by_adapter(layer) for name in weights}


def trainable_parameters(model: nn.Module, adapter: str | None) -> list[nn.Parameter]:
    """The parameters of ``model`` that require grad; with an adapter, its own only."""
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return [parameter for name, parameter in trained if adapter is None or adapter in name.split(".")]


def parameters_under(model: nn.Module, adapter: str | None) -> list[nn.Parameter]:
    """The parameters that a forward under an adapter uses: all but the parameters of other
    adapters."""
    containers = [weights for layer in adapter_layers(model) for weights in _weights_by_adapter(layer)]
    others = [part for weights in containers for name, part in weights.items() if name != adapter]
    unused = {id(p) for part in others for p in (part.parameters() if isinstance(part, nn.Module) else [part])}
    return [parameter for parameter in model.parameters() if id(parameter) not in unused]


def check_adapter(model: nn.Module, adapter: str | None) -> list[Any]:
    """The PEFT layers of ``model``, if forwards can run under ``adapter``.

    Raises:
        AdapterError: the model has no such adapter, or another one is merged into its weights.
    """
    layers = adapter_layers(model)
    for layer in layers:
        if (merged := layer.merged_adapters) and merged != [adapter]:
            raise AdapterError(
                f"The adapter {adapter!r} was asked for while {merged} is merged into the weights of the base model. "
                "Call unmerge_adapter() first."
            )
    if adapter is None:
        return layers
    if not layers:
        raise AdapterError(
            f"The adapter {adapter!r} was asked for, but {type(model).__name__} has no LoRA adapters. "
            "Pass adapter=None, or wrap the model with peft.get_peft_model first."
        )
    if not any(adapter in available_adapters(layer) for layer in layers):
        names = sorted({name for layer in layers for name in available_adapters(layer)})
        raise AdapterError(f"The model has no adapter {adapter!r}; it has {names}.")
    return layers


# Adding adapters.


class _OutsideAutocast:
    """Whether PEFT casts the input of an adapter to the adapter's dtype, asked in each forward.

    Autocast would cast it back: two passes over each input, whose float32 copy the backward would
    keep.
    """

    def __bool__(self) -> bool:
        return not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"))


_OUTSIDE_AUTOCAST = _OutsideAutocast()


def cast_outside_autocast(model: nn.Module) -> None:
    """Let no adapter of ``model`` cast its inputs under autocast; PEFT's own layers, such as those
    that it has just added, do."""
    for layer in adapter_layers(model):
        layer.cast_input_dtype_enabled = _OUTSIDE_AUTOCAST


def add_adapters(base: nn.Module, lora: LoraConfig, names: Sequence[str], *, seed: int) -> Any:
    """``base`` as a ``PeftModel`` with one adapter per name, the first one active; all but
    ``reference`` train.

    Raises:
        LoraTargetError: the settings do not fit the model; errors of PEFT and of a first forward
            are among the causes.
    """
    _check_lora(base, lora)
    try:
        lora = _within_language_model(base, lora)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # PEFT asks transformers under a name that transformers has renamed; the question has
            # the same answer.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            # PEFT initializes on the CPU and moves the weights afterwards, so the CPU generator
            # alone needs a seed.
            torch.default_generator.manual_seed(seed)
            # Copies: PEFT writes into the settings that it is given.
            model: Any = get_peft_model(base, copy.deepcopy(lora), adapter_name=names[0])
            for name in names[1:]:
                model.add_adapter(name, copy.deepcopy(lora))
        cast_outside_autocast(model)
        # PEFT lets the active adapter train, and switches the others off.
        model.set_requires_grad([name for name in names if name != "reference"], True)
        # Some targets fail in a forward only: the routers of Llama4 and PhiMoE return tuples, which
        # LoRA cannot add to.
        run_once(model.eval())
    except FAILURES as error:
        plain = sorted({n.rpartition(".")[2] for n, m in base.named_modules() if type(m) in (nn.Linear, Linear)})
        raise LoraTargetError(
            f"LoRA with target_modules={lora.target_modules!r} does not work on {type(base).__name__}: {error} "
            f"Name target_modules among its plain linear modules, which are {plain}."
        ) from error
    return model


def _within_language_model(base: nn.Module, lora: LoraConfig) -> LoraConfig:
    """``lora``, kept out of the parts of a multimodal model that text does not pass through."""
    names = {id(module): name for name, module in base.named_modules()}
    decoder, head = (names.get(id(x)) for x in (backbone(base), causal_lm(base).get_output_embeddings()))
    linear = [name for name, module in base.named_modules() if isinstance(module, nn.Linear) and name != head]
    if not decoder or all(name.startswith(f"{decoder}.") for name in linear):
        return lora
    given = lora.exclude_modules
    own = [] if not given else [given] if isinstance(given, str) else [rf"(.*\.)?({'|'.join(map(re.escape, given))})"]
    # As exclude_modules, which PEFT applies to every form of target_modules, "all-linear" too.
    kept = rf"(?!{re.escape(decoder)}\.|{re.escape(head or '')}$).*"
    lora = copy.deepcopy(lora)
    lora.exclude_modules = "|".join(f"({pattern})" for pattern in (kept, *own))
    return lora


def _check_lora(base: nn.Module, lora: LoraConfig) -> None:
    if lora.lora_dropout:
        raise LoraTargetError(
            f"lora_dropout is {lora.lora_dropout}; expected 0: with dropout, the log-probs of one row differ from one "
            "forward to the next, and ratios of them are noise."
        )
    if lora.init_lora_weights not in (True, False, "gaussian", "orthogonal"):
        raise LoraTargetError(
            f"init_lora_weights is {lora.init_lora_weights!r}; expected True, False, 'gaussian' or 'orthogonal': other "
            "initializations change the base weights, which are the reference model here."
        )
    if lora.bias != "none":
        raise LoraTargetError(
            f"bias is {lora.bias!r}; expected 'none': the biases of the base model are shared by actor, critic and reference."
        )
    targets = lora.target_modules
    if targets is None or targets == "all-linear":
        return
    # PEFT itself refuses only settings of which no target at all is found.
    patterns = (
        {targets: targets} if isinstance(targets, str) else {t: rf"(.*\.)?{re.escape(t)}" for t in sorted(targets)}
    )
    names = [name for name, _ in base.named_modules()]
    missing = [target for target, each in patterns.items() if not any(re.fullmatch(each, name) for name in names)]
    if missing:
        linear = sorted({n.rpartition(".")[2] for n, m in base.named_modules() if isinstance(m, nn.Linear)})
        raise LoraTargetError(
            f"LoRA targets {missing} match no module of {type(base).__name__}. Its linear modules are {linear}; name "
            'some of them in target_modules, or pass "all-linear".'
        )


# Fusing an adapter with its base layers.


class FusedLora:
    """Replaces a model's LoRA layers by plain ones, for forwards that train nothing.

    PEFT's layers spend more time in calls, and on a GPU in launches, than in computing. A small
    float32 model gets one linear layer for each, with the weight ``W + scaling * B @ A``. In half
    precision that sum would round small changes away, and for a large model its copies would be
    large: there a product with each factor is added to the one with W, in the dtype of W.

    Neither parameters nor LoRA layers are touched: modules are exchanged inside :meth:`in_place`
    and put back. Only what is the same computation up to rounding is exchanged: plain LoRA on
    ``nn.Linear`` layers.

    Args:
        model: any module.
        adapter: the adapter to fuse; ``None``: the layers without adapters.
        max_bytes: most memory for fused weights; above it the factors stay apart.
    """

    def __init__(self, model: nn.Module, *, adapter: str | None, max_bytes: int = _MAX_FUSED_BYTES) -> None:
        layers = [layer for layer in model.modules() if isinstance(layer, Linear) and "forward" not in vars(layer)]
        layers = [layer for layer in layers if is_plain(layer, adapter)]
        weights = [layer.base_layer.weight for layer in layers if adapter in layer.lora_A]
        in_float32 = all(each.dtype == torch.float32 for each in weights)
        replace = _merged if in_float32 and sum(each.nbytes for each in weights) <= max_bytes else _LowRank
        fused = {
            id(layer): replace(layer, adapter) if adapter in layer.lora_A else layer.base_layer for layer in layers
        }
        children = ((parent, name, child) for parent in model.modules() for name, child in parent.named_children())
        self._places = [(*place, fused[id(place[-1])]) for place in children if id(place[-1]) in fused]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Exchange the layers, and put them back."""
        try:
            for parent, name, _, fused in self._places:
                setattr(parent, name, fused)
            yield
        finally:
            for parent, name, layer, _ in self._places:
                setattr(parent, name, layer)


_FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_plain(layer: Any, adapter: str | None) -> bool:
    """Whether a LoRA layer is plain LoRA on an ``nn.Linear``, if it has the adapter."""
    base = layer.base_layer
    if layer.merged or type(base) is not nn.Linear or base.weight.dtype not in _FUSED_DTYPES:
        return False
    if adapter not in layer.lora_A:
        return True
    plain = adapter not in layer.lora_variant and not layer.lora_bias[adapter]
    return plain and layer.lora_A[adapter].weight.dtype in (torch.float32, base.weight.dtype)


def _merged(layer: Any, adapter: str | None) -> nn.Module:
    base = layer.base_layer
    # On the meta device no memory is allocated, and no first weights are drawn from the global
    # generator.
    fused = nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
    fused.weight = nn.Parameter(base.weight.detach() + layer.get_delta_weight(adapter).detach(), requires_grad=False)
    fused.bias = base.bias
    return fused.eval()


class _LowRank(nn.Module):
    """A linear layer and its adapter in three products, the factors in the dtype of the layer. For
    forwards without a graph."""

    def __init__(self, layer: Any, adapter: str | None) -> None:
        super().__init__()
        self.base = layer.base_layer
        dtype = self.base.weight.dtype
        self.down = layer.lora_A[adapter].weight.detach().to(dtype)
        self.up = (layer.lora_B[adapter].weight.detach() * layer.scaling[adapter]).to(dtype).T

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        # Into the output of the layer, which nobody else has.
        out.view(-1, out.shape[-1]).addmm_(nn.functional.linear(x, self.down).flatten(0, -2), self.up)
        return out
