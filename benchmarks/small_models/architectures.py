"""Does a type of model work here? :func:`check` tries sampler, scorer, critic, LoRA and shared
prefixes on a tiny random one.

``python benchmarks/small_models/architectures.py`` tries every causal language model type of the
installed transformers and writes the table of ``docs/results/architectures.md``;
``make test-models`` runs it. Each type has a process of its own, so that one that crashes or hangs
does not end the sweep.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import peft
import torch
import transformers
from peft import LoraConfig
from tensordict import TensorDict
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from torchrl_llm import keys
from torchrl_llm.modules import HFPolicy, SamplingConfig, TokenScorer, TurnCritic, load_actor_critic
from torchrl_llm.modules.lm import backbone, reset_ropes
from torchrl_llm.modules.prefix_attention import PrefixSharing
from torchrl_llm.modules.prefixes import PrefixCost

PARTS = ("sampler", "scorer", "LoRA", "shared")
"""What is tried: :class:`HFPolicy`; :class:`TokenScorer` and :class:`TurnCritic`; ``all-linear``
adapters; shared prefixes."""

VOCABULARY, END = 128, 1
WINDOW, POSITIONS = 16, 128
"""Tokens that attention windows reach back, and the longest context."""

# What a field of a configuration becomes, wherever it stands. Fields that a configuration does not
# have are left out.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "unpadded_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "word_embed_proj_dim", "embedding_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "d_kv", "dim_head", "d_head", "attention_head_size"), 8),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "moe_intermediate_size", "ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "dim_ff", "dff", "d_ff", "d_inner", "feed_forward_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size", "dense_intermediate_size"), 48),
    **dict.fromkeys(("expert_ffn_hidden_size", "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_blocks"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), POSITIONS),
    **dict.fromkeys(("max_target_positions", "model_max_length"), POSITIONS),
    **dict.fromkeys(("sliding_window", "window_size", "sliding_window_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("keep_window_size", "attention_chunk_size"), WINDOW),
    "local_attention": 2 * WINDOW,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "index_head_dim"), 8),
    "qk_head_dim": 16,
    "rotary_dim": 4,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "index_n_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": END,
}  # fmt: skip

# What some types need besides.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_INDEX = {"index_n_heads": 2, "index_topk": 64}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA,
    "granitemoehybrid": _MAMBA,
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4, "head_dim": 16, "per_layer_config": {"2": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "reformer": {"is_decoder": True},
    "opt": {"word_embed_proj_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, dynamic RoPE": (
        "llama",
        {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "phi3, longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0, 1.0, 1.0, 1.0],
                "long_factor": [2.0, 3.0, 5.0, 7.0],
            },
        },
    ),
}
"""Settings of a type that change what a row's log-prob depends on: name -> type and fields."""

_LENGTHS = (29, 3, 13, 20)  # prompts: shorter and longer than the window
_FEEDBACK = (4, 2, 9, 1)
_TURNS, _RESPONSE = 3, 5
_TOLERANCE = 1e-3  # nats; float32 rounding is below 1e-4


@dataclass(frozen=True)
class Finding:
    """What one part of the library does with one type of model.

    Attributes:
        status: ``"agrees"`` with a plain forward; ``"rows"``: agrees because nothing is shared;
            ``"refused"`` by an error of this library; ``"wrong"`` log-probs, values or gradients;
            ``"error"``: one of somebody else; ``"unbuilt"``: there is no tiny model of this type.
        note: how wrong, or the error's message.
    """

    status: Literal["agrees", "rows", "refused", "wrong", "error", "unbuilt"]
    note: str = ""


class Disagreement(AssertionError):
    """Two computations of the same number differ."""


class NothingSharedError(Exception):
    """The model computes every row by itself; the message is the library's reason."""


class _Cut(PrefixSharing):
    """Cuts wherever rows fork, whatever it costs."""

    __slots__ = ()

    def cost(self, device: torch.device) -> PrefixCost:
        return PrefixCost(stage=0, context=0, key=0)


def model_types() -> list[str]:
    """Every causal language model type of the installed transformers, and :data:`VARIANTS`."""
    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


# Tiny random models.


def tiny_config(name: str) -> PreTrainedConfig:
    """A configuration of two layers or little more, of every kind of layer that the type has."""
    model_type, fields = VARIANTS.get(name, (name, {}))
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**(_shrunk(_defaults(config_class)) | OVERRIDES.get(model_type, {}) | fields))


def _defaults(config_class: Any) -> dict[str, Any]:
    return config_class().to_dict()


def _shrunk(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields to change, fields of nested configurations included."""
    found: dict[str, Any] = {}
    layers = next((fields[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if fields.get(name)), 0)
    kept = _kept_layers(fields, layers)
    for name, value in fields.items():
        if isinstance(value, dict) and "model_type" in value:
            found[name] = {"model_type": value["model_type"]} | _shrunk(value)
        elif name in SIZES and (value is not None or name in _DERIVED):
            found[name] = SIZES[name]
        elif _is_per_layer(value, layers):
            found[name] = [value[i] for i in kept]
    # latent attention has a key head for every head
    if "kv_lora_rank" in fields and "num_key_value_heads" in found:
        found["num_key_value_heads"] = SIZES["num_attention_heads"]
    return {name: len(kept) if name in _DEPTHS else value for name, value in found.items()}


_DERIVED = ("num_experts_per_tok", "pad_token_id", "bos_token_id", "eos_token_id", "head_dim", "num_key_value_heads")
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")


def _is_per_layer(value: Any, layers: int) -> bool:
    return isinstance(value, list) and len(value) == layers > 1


def _kept_layers(fields: dict[str, Any], layers: int) -> list[int]:
    """The first layer of each kind, at least two."""
    lists = [value for name, value in fields.items() if _is_per_layer(value, layers)]
    first: dict[str, int] = {}
    for i in range(layers):
        first.setdefault(repr([value[i] for value in lists]), i)
    kept = sorted(first.values())
    return kept if len(kept) > 1 else [0, 1]


def tiny_model(config: PreTrainedConfig, seed: int = 0) -> Any:
    """A random model in float32, far from uniform; the global generators are left as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, 0.2)
    return model.eval()


def _tokenizer() -> Any:
    vocabulary = {str(i): i for i in range(VOCABULARY)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=str(END))


# What is compared.


@torch.no_grad()
def _plain(model: Any, row: Sequence[int]) -> Tensor:
    """Log-probs ``[n - 1]`` of the tokens of one row after the first, by the model's own forward,
    without padding."""
    reset_ropes(model)  # with dynamic scaling they keep the frequencies of the longest input so far
    logits = model(input_ids=torch.tensor([row[:-1]]), use_cache=False).logits[0].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(row[1:]).unsqueeze(-1)).squeeze(-1)


def _agree(what: str, found: Tensor, expected: Tensor, tolerance: float = _TOLERANCE) -> None:
    gap = float((found - expected).abs().max())
    if not gap <= tolerance:
        raise Disagreement(f"{what}: off by {gap:.2g}")


def _random_ids(n: int, seed: int) -> list[int]:
    return torch.randint(2, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def _batch(prompts: Sequence[Sequence[int]], turn: int) -> TensorDict:
    lengths = torch.tensor([[len(row)] for row in prompts])
    prompt = torch.full((len(prompts), int(lengths.max())), 7)
    for i, row in enumerate(prompts):
        prompt[i, : len(row)] = torch.tensor(row)
    fields = {
        keys.PROMPT: prompt,
        keys.PROMPT_LENGTH: lengths,
        keys.TURN: torch.full_like(lengths, turn),
        keys.EPISODE_ID: torch.arange(len(prompts)).unsqueeze(-1),
    }
    return TensorDict(fields, batch_size=[len(prompts)])


def _rows(rows: Sequence[Sequence[int]], actions: Sequence[Sequence[tuple[int, int]]]) -> TensorDict:
    """Rows of tokens as scorer and critic read them; ``actions`` are the (start, end) of each row's
    turns."""
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    mask, turn_ids = torch.zeros_like(tokens, dtype=torch.bool), torch.full_like(tokens, -1)
    for i, (row, turns) in enumerate(zip(rows, actions, strict=True)):
        tokens[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = True
        for turn, (start, end) in enumerate(turns):
            turn_ids[i, start:end] = turn
    fields = {keys.TOKENS: tokens, keys.ATTENTION_MASK: mask, keys.TURN_IDS: turn_ids}
    return TensorDict(fields, batch_size=[len(rows)])


def check_sampler(model: Any, scorer: TokenScorer, plain: Any, *, adapter: str | None = None) -> None:
    """Three turns of ragged rows: the policy's log-probs are the plain forward's and the scorer's.

    Args:
        model: what the policy generates with.
        scorer: scores the same distribution.
        plain: the transformers model whose own forward is the truth.
        adapter: the policy's adapter.
    """
    policy = HFPolicy(model, _tokenizer(), SamplingConfig(max_output_tokens=_RESPONSE, stop_ids=()), adapter=adapter)
    rows = [_random_ids(n, seed=i) for i, n in enumerate(_LENGTHS)]
    actions: list[list[tuple[int, int]]] = [[] for _ in rows]
    said: list[list[Tensor]] = [[] for _ in rows]
    for turn in range(_TURNS):
        out = policy(_batch(rows, turn))
        for i, row in enumerate(rows):
            actions[i].append((len(row), len(row) + _RESPONSE))
            row += out[keys.RESPONSE][i].tolist()
            said[i].append(out[keys.RESPONSE_LOG_PROBS][i])
            expected = _plain(plain, row)[-_RESPONSE:]
            _agree(f"sampler and plain forward, turn {turn + 1}", said[i][-1], expected)
            if turn + 1 < _TURNS:
                row += _random_ids(_FEEDBACK[i], seed=100 * turn + i)
    td = _rows(rows, actions)
    with torch.no_grad():
        scores = scorer(td)[keys.LOG_PROB]
    _agree("sampler and scorer", torch.cat([x for row in said for x in row]), scores[td[keys.TURN_IDS] >= 0])


def check_scorer(scorer: TokenScorer, critic: TurnCritic, plain: Any) -> None:
    """Rows of very different lengths in one batch: log-probs and values equal the results of each
    row alone."""
    rows = [_random_ids(n, seed=i) for i, n in enumerate((30, 90, 8, 60))]
    actions = [[(4, 9), (len(row) - 3, len(row))] for row in rows]
    actions[2] = [(2, 5)]
    td = _rows(rows, actions)
    with torch.no_grad():
        nn.init.constant_(critic.value_head.weight, 0.5)
        scorer(td), critic(td)
    for i, row in enumerate(rows):
        there = td[keys.TURN_IDS][i, : len(row)] >= 0
        last = int(there.nonzero().max())
        expected = _plain(plain, row[: last + 1])[there[1 : last + 1]]
        _agree("scorer and plain forward", td[keys.LOG_PROB][i, : len(row)][there], expected)
        with torch.no_grad():
            reset_ropes(plain)
            state = backbone(plain)(input_ids=torch.tensor([row]), use_cache=False).last_hidden_state[0]
            values = critic.value_head(state).squeeze(-1)
        _agree("critic and plain forward", td[keys.STATE_VALUE][i, : len(row)][there], values[:-1][there[1:]])
        _agree("critic and plain forward", td[keys.BOOTSTRAP_VALUE][i], values[-1])


def check_lora(config: PreTrainedConfig) -> None:
    """``all-linear`` adapters, perturbed: the reference is the base, and the critic's gradient its
    own."""
    base = tiny_model(config)
    lora = LoraConfig(r=2, target_modules="all-linear")
    models = load_actor_critic(tiny_model(config), lora=lora, critic=True, reference=True)
    assert models.critic is not None and models.reference is not None  # noqa: PT018
    generator = torch.Generator().manual_seed(1)
    actor, critic = models.actor_parameters(), models.critic_parameters()
    with torch.no_grad():
        for parameter in actor + critic:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    row = _random_ids(20, seed=5)
    td = _rows([row, row[:9]], [[(3, 6), (15, 20)], [(2, 4)]])
    there = td[keys.TURN_IDS][0] >= 0
    _agree("reference and base", models.reference(td.clone())[keys.LOG_PROB][0][there], _plain(base, row)[there[1:]])
    values = models.critic(td.clone())
    (values[keys.STATE_VALUE].sum() + values[keys.BOOTSTRAP_VALUE].sum()).backward()
    if any(parameter.grad is not None for parameter in actor):
        raise Disagreement("the critic's loss reaches the actor's adapter")
    if all(parameter.grad is None for parameter in critic[:-2]):
        raise Disagreement("the critic's loss does not reach the critic's adapter")
    model: Any = models.model
    score = models.actor(td.clone())[keys.LOG_PROB][0][there].detach()
    model.set_adapter("actor")
    own = _plain(model.get_base_model(), row)[there[1:]]
    _agree("actor and plain forward with PEFT's own switch", score, own)
    if float((own - _plain(base, row)[there[1:]]).abs().max()) < _TOLERANCE:
        raise Disagreement("the adapters change nothing")


def check_shared(config: PreTrainedConfig) -> None:
    """Rows that share prefixes, up to more than a window: log-probs, values and gradients are those
    of the rows one by one."""
    with _first_warning("torchrl_llm.modules.prefix_attention") as warned:
        models = load_actor_critic(tiny_model(config), lora=LoraConfig(r=2, target_modules="all-linear"), critic=True)
    assert models.critic is not None
    sharing = models.actor.prefixes
    if sharing is None:
        raise NothingSharedError(warned[0].rpartition("share: ")[2] if warned else "")
    generator = torch.Generator().manual_seed(1)
    parameters = models.actor_parameters() + models.critic_parameters()
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    common, forks = _random_ids(WINDOW + 9, seed=0), _random_ids(11, seed=1)
    rows = [
        common + forks,
        common + forks[:6] + _random_ids(9, seed=2),
        common + _random_ids(4, seed=3),
        _random_ids(13, seed=4),
    ]
    td = _rows(rows, [[(8, 12), (len(row) - 3, len(row))] for row in rows])
    there = td[keys.TURN_IDS] >= 0
    results = []
    for prefixes in (None, _Cut(*sharing)):
        models.actor.prefixes = models.critic.prefixes = prefixes
        scores, values = models.actor(td.clone())[keys.LOG_PROB], models.critic(td.clone())
        values = torch.cat([values[keys.STATE_VALUE][there], values[keys.BOOTSTRAP_VALUE].flatten()])
        weights = torch.linspace(-1, 1, int(there.sum()))
        gradients = torch.autograd.grad((weights * scores[there]).sum() + values.sum(), parameters, allow_unused=True)
        flat = torch.cat([torch.zeros(1) if gradient is None else gradient.flatten() for gradient in gradients])
        results.append((scores[there].detach(), values.detach(), flat))
    (scores, values, gradient), (shared_scores, shared_values, shared_gradient) = results
    _agree("log-probs with shared prefixes", shared_scores, scores)
    _agree("values with shared prefixes", shared_values, values)
    _agree("gradients with shared prefixes", shared_gradient / gradient.norm(), gradient / gradient.norm())


@contextmanager
def _first_warning(name: str) -> Iterator[list[str]]:
    """What a logger warns of inside."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def check(name: str) -> dict[str, Finding]:
    """What each of :data:`PARTS` does with a tiny random model.

    Args:
        name: one of :func:`model_types`.

    Examples:
        >>> {part: finding.status for part, finding in check("qwen2").items()}
        {'sampler': 'agrees', 'scorer': 'agrees', 'LoRA': 'agrees', 'shared': 'agrees'}
    """
    try:
        config = tiny_config(name)
        tiny_model(config)(input_ids=torch.tensor([_random_ids(9, seed=0)]), use_cache=False).logits  # noqa: B018
    except Exception as error:  # noqa: BLE001 - any: the type is then listed as one that was not tried
        return dict.fromkeys(PARTS, Finding("unbuilt", _message(error)))

    def sampler() -> None:
        model = tiny_model(config)
        check_sampler(model, TokenScorer(model), model)

    def scorer() -> None:
        model = tiny_model(config)
        models = load_actor_critic(model, critic=True)
        assert models.critic is not None
        check_scorer(models.actor, models.critic, model)

    parts: tuple[Callable[[], None], ...] = (sampler, scorer, lambda: check_lora(config), lambda: check_shared(config))
    return {part: _finding(run) for part, run in zip(PARTS, parts, strict=True)}


def _finding(run: Callable[[], None]) -> Finding:
    try:
        run()
    except Disagreement as error:
        return Finding("wrong", str(error))
    except NothingSharedError as error:
        return Finding("rows", str(error))
    except Exception as error:  # noqa: BLE001 - what is caught is reported
        ours = type(error).__module__.startswith("torchrl_llm")
        return Finding("refused" if ours else "error", _message(error))
    return Finding("agrees")


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# The sweep.


def sweep(names: Sequence[str], *, limit: float = 240.0) -> Iterator[tuple[str, dict[str, Finding]]]:
    """:func:`check` each type in a process of its own; one that takes longer than ``limit`` seconds
    is an error."""
    # starting afresh would import everything anew for every type
    context: Any = multiprocessing.get_context("fork")
    for name in names:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=lambda name=name, sender=sender: sender.send(check(name)))
        process.start()
        sender.close()
        try:
            found = receiver.recv() if receiver.poll(limit) else _all("error", f"more than {limit:g} seconds")
        except EOFError:
            process.join()
            found = _all("error", f"the process ended with {process.exitcode}")
        process.kill()
        process.join()
        yield name, found


def _all(status: Any, note: str) -> dict[str, Finding]:
    return dict.fromkeys(PARTS, Finding(status, note))


def table(found: dict[str, dict[str, Finding]]) -> str:
    """The page of the documentation."""
    counts = Counter(_verdict(parts) for parts in found.values())
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    lines = [
        "# Architectures",
        "",
        f"Every causal language model type of transformers {transformers.__version__}, as a tiny random model with windows "
        f"of {WINDOW} tokens: {summary}.",
        "",
        "- **sampler**: `HFPolicy` plays three turns of ragged rows; its log-probs equal the log-probs of the scorer and of the model's "
        "own forward on each row alone.",
        "- **scorer**: log-probs of `TokenScorer` and values of `TurnCritic` in a batch of very different rows equal the numbers of "
        "each row alone.",
        '- **LoRA**: with `target_modules="all-linear"` and perturbed adapters the reference is the untouched base, and the '
        "critic's gradient stays out of the actor.",
        "- **shared**: log-probs, values and gradients of rows that fork equal the results of the rows one by one. Where a type is said to "
        "compute *rows*, nothing is shared, which the library says when it loads the model.",
        "",
        "Refused means an error that says why, before anything is computed with. A type that is refused as a sampler "
        "only can be trained with a vLLM policy. Not built: the tiny configuration does not fit this type, so nothing "
        f"was tried. Written by `make test-models` (peft {peft.__version__}, torch {torch.__version__.partition('+')[0]}).",
        "",
        "| type | sampler | scorer | LoRA | shared | why |",
        "|---|---|---|---|---|---|",
    ]
    for name, parts in sorted(found.items()):
        notes = dict.fromkeys(_short(finding.note) for finding in parts.values() if finding.note)
        cells = [_WORDS.get(parts[part].status, parts[part].status) for part in PARTS]
        lines.append(f"| {name} | {' | '.join(cells)} | {'; '.join(notes)} |")
    return "\n".join(lines) + "\n"


_WORDS = {"unbuilt": "not built", "wrong": "**wrong**", "error": "**error**"}


def _verdict(parts: dict[str, Finding]) -> str:
    statuses = {finding.status for finding in parts.values()}
    if statuses == {"agrees"}:
        return "agree in all four"
    worst = next(status for status in ("wrong", "error", "unbuilt", "refused", "rows") if status in statuses)
    words = {
        "unbuilt": "could not be built",
        "refused": "are refused in one or more",
        "rows": "agree and share nothing",
    }
    return words.get(worst, f"are {worst}")


def _short(note: str) -> str:
    text = note.partition(": ")[2] if note.startswith("Unsupported") else note
    text = text if len(text) <= 150 else f"{text[:150].rpartition(' ')[0]} ..."
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[")


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep over all types, or those that are named; 1 if anything is wrong or raises somebody
    else's error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; default: all")
    parser.add_argument("--table", type=Path, help="write the table to this file")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    found, faults = {}, 0
    for name, parts in sweep(options.types or model_types()):
        found[name] = parts
        faults += any(finding.status in ("wrong", "error") for finding in parts.values())
        cells = " | ".join(f"{part}: {f.status} {f.note[:160]}" for part, f in parts.items())
        sys.stdout.write(f"{name}: {cells}\n")
        sys.stdout.flush()
    if options.table:
        options.table.write_text(table(found))
    sys.stdout.write(f"{len(found)} types, {faults} with faults\n")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
