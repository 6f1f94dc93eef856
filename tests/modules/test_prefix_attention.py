"""Forwards that compute shared prefixes once, against plain rows: values, gradients, families of
models, what is refused."""

from __future__ import annotations

import copy
import json
import logging
import re
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict
from tiny_models import TINY, VOCABULARY, make_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from torchrl_llm.data import micro_batches
from torchrl_llm.data.batching import pad_rows
from torchrl_llm.modules import SamplingConfig, TokenScorer, TurnCritic, enable_prefix_sharing, load_actor_critic
from torchrl_llm.modules.adapters import enable_gradient_checkpointing
from torchrl_llm.modules.prefix_attention import ATTENTION, PrefixSharing
from torchrl_llm.modules.prefixes import PrefixCost, plan_prefixes
from torchrl_llm.objectives import LLMPPOLoss, total, write_loss_weights

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


FREE = PrefixCost(stage=0, context=0, key=0)


class Free(PrefixSharing):
    """Cuts wherever rows fork, however little that saves."""

    free = FREE

    def cost(self, device: torch.device, *, recomputed: bool = False) -> PrefixCost:
        return replace(self.free, max_length=self.max_length)


class Dear(Free):
    """Copies of keys are dear: rows stay in few pieces."""

    free = replace(FREE, key=0.01)


def shared(model, cls=Free) -> Free:
    sharing = enable_prefix_sharing(model)
    assert sharing is not None
    return cls(*sharing)


def make_rows(seed: int = 0, *, batch: int = 9, length: int = 26) -> TensorDict:
    """Rows that fork at random places from the rows before them, with random lengths and turns of
    their own."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    lengths = torch.randint(4, length + 1, (batch,), generator=generator)
    turn_ids = torch.full((batch, length), -1)
    for row in range(batch):
        if row:
            parent = int(torch.randint(row, (), generator=generator))
            fork = int(torch.randint(length + 1, (), generator=generator))
            tokens[row, :fork] = tokens[parent, :fork]
        place = int(torch.randint(1, 4, (), generator=generator))
        for turn in range(3):
            end = place + int(torch.randint(2, 6, (), generator=generator))
            turn_ids[row, place:end] = turn
            place = end + int(torch.randint(0, 3, (), generator=generator))
    mask = torch.arange(length) < lengths.unsqueeze(-1)
    return TensorDict(
        tokens=tokens.masked_fill(~mask, 0),
        attention_mask=mask,
        turn_ids=turn_ids.masked_fill(~mask, -1),
        batch_size=[batch],
    )


def tokens_computed(model) -> list[int]:
    """The tokens of each forward from now on."""
    counts: list[int] = []
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, out: counts.append(args[0].numel()))
    return counts


def gradients(model, out: torch.Tensor, seed: int = 0) -> list[torch.Tensor]:
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(seed))
    wanted = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad((out * weight).sum(), wanted, allow_unused=True, materialize_grads=True))


def assert_same(found, expected, relative: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=relative * float(other.detach().abs().max().clamp(min=1)))


class TestScores:
    @pytest.mark.parametrize("cls", [Free, Dear])
    @pytest.mark.parametrize("seed", range(4))
    def test_scores_and_gradients_are_those_of_plain_rows(self, exact_norms, seed, cls):
        model, rows = make_model(), make_rows(seed)
        sharing, counts, found = shared(model, cls), tokens_computed(model), []
        for prefixes in (None, sharing):
            scorer = TokenScorer(model, SamplingConfig(temperature=0.7), entropy=True, prefixes=prefixes)
            log_prob, entropy = scorer.score(*(rows[key] for key in scorer.in_keys))
            found.append([log_prob, entropy, *gradients(model, log_prob - 0.3 * entropy)])
        plain, tree = found
        assert counts[1] < 0.9 * counts[0]
        assert_same(tree, plain, 1e-10)

    def test_where_copies_are_dear_rows_are_cut_into_pieces(self):
        rows = make_rows()
        plans = [
            plan_prefixes(rows["tokens"].numpy(), rows["attention_mask"].sum(-1).numpy(), cls.free)
            for cls in (Free, Dear)
        ]
        copied = [sum(stage.keys.size for stage in plan.stages if stage.start) for plan in plans]
        assert copied[1] < 0.7 * copied[0]
        assert len(plans[1].tokens) == len(plans[0].tokens)

    def test_stop_ids_are_held_back_by_the_turns_of_each_row(self, exact_norms):
        """Rows of the same tokens and other turns: at one token the stop ids are excluded in the
        one, and not in the other."""
        model, rows = make_model(), make_rows()
        rows["tokens"][1] = rows["tokens"][0]
        rows["attention_mask"][:2] = True
        rows["turn_ids"][:2] = torch.tensor([[-1] * 4 + [0] * 22, [-1] * 6 + [0] * 20])
        sampling = SamplingConfig(min_output_tokens=3, stop_ids=(5, 6))
        plain = TokenScorer(model, sampling)(rows.clone())["log_prob"]
        tree = TokenScorer(model, sampling, prefixes=shared(model))(rows.clone())["log_prob"]
        assert_same([tree], [plain], 1e-10)
        assert (plain[0, 7:9] != plain[1, 7:9]).all()

    def test_one_row_and_rows_without_actions(self):
        model, rows = make_model(), make_rows()
        scorer = TokenScorer(model, prefixes=shared(model))
        rows["turn_ids"][:] = -1
        out = scorer(rows)["log_prob"]
        assert (out == 0).all()
        assert all((grad == 0).all() for grad in gradients(model, out))
        assert scorer(make_rows()[:1])["log_prob"].shape == (1, 26)

    def test_adapters_and_checkpointing(self, exact_norms):
        base, rows = make_model(), make_rows()
        sharing = shared(base)
        model = get_peft_model(base, LoraConfig(**LORA), adapter_name="actor")
        scorer = TokenScorer(model, adapter="actor")
        plain = scorer(rows.clone())["log_prob"]
        expected = [plain, *gradients(model, plain)]
        scorer.prefixes = sharing
        for checkpointing in (False, True):
            if checkpointing:
                enable_gradient_checkpointing(model)
            tree = scorer(rows.clone())["log_prob"]
            assert_same([tree, *gradients(model, tree)], expected, 1e-10)
        reference = TokenScorer(model, frozen=True)
        plain = reference(rows.clone())["log_prob"]
        reference.prefixes = sharing
        assert_same([reference(rows.clone())["log_prob"]], [plain], 1e-10)

    def test_segments_share_too(self, exact_norms):
        """A gap starts a segment, whose first tokens may equal the first tokens of the row's first
        segment: the system prompt."""
        model, rows = make_model(), make_rows(batch=3)
        rows["attention_mask"][:] = torch.arange(26) != 12
        rows["tokens"][:, 13:18] = rows["tokens"][:, :5]
        rows["turn_ids"][:] = -1
        rows["turn_ids"][:, 6:12], rows["turn_ids"][:, 20:26] = 0, 1
        plain = TokenScorer(model)(rows.clone())["log_prob"]
        counts = tokens_computed(model)
        tree = TokenScorer(model, prefixes=shared(model))(rows.clone())["log_prob"]
        assert counts[-1] < 6 * 13
        assert_same([tree], [plain], 1e-10)

    def test_bfloat16(self):
        model, rows = make_model(torch.bfloat16), make_rows()
        plain = TokenScorer(model)(rows.clone())["log_prob"]
        tree = TokenScorer(model, prefixes=shared(model))(rows.clone())["log_prob"]
        assert tree.dtype == torch.float32
        assert float((tree - plain).detach().abs().mean()) < 0.05


class TestValues:
    @pytest.mark.parametrize("seed", range(3))
    def test_values_and_gradients_are_those_of_plain_rows(self, exact_norms, seed):
        model, rows = make_model(), make_rows(seed)
        critic = TurnCritic(model)
        torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(1))
        inputs, found = [rows[key] for key in critic.in_keys], []
        for critic.prefixes in (None, shared(model)):
            state_value, bootstrap_value = critic.value(*inputs)
            found.append(
                [state_value, bootstrap_value, *gradients(critic, state_value + bootstrap_value.unsqueeze(-1))]
            )
        assert_same(found[1], found[0], 1e-10)


class TestLosses:
    @pytest.mark.parametrize("max_tokens", [30, 40, 10**6])
    def test_the_gradient_does_not_depend_on_the_split(self, exact_norms, max_tokens):
        """LLMPPO on micro-batches of shared prefixes, rows in another order and padded, against one
        batch of plain rows."""
        model, rows = make_model(), make_rows(5)
        sharing = shared(model)
        actor, critic = TokenScorer(model, entropy=True), TurnCritic(copy.deepcopy(model.model))
        torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(1))
        loss = LLMPPOLoss(actor, critic, entropy_coeff=0.1, kl_coeff=0.0)
        generator = torch.Generator().manual_seed(2)
        for key in ("sample_log_prob", "advantage", "value_target", "state_value"):
            rows[key] = torch.randn(rows["tokens"].shape, dtype=torch.float64, generator=generator) - 2
        write_loss_weights(rows, loss)
        found = []
        for actor.prefixes, parts in (
            (None, [rows]),
            (sharing, micro_batches(pad_rows(rows, 31, 0)[torch.arange(8, -1, -1)], max_tokens, FREE)),
        ):
            critic.prefixes = actor.prefixes
            for part in parts:
                total(loss(part)).backward()
            found.append([p.grad for p in loss.parameters() if p.grad is not None])
            loss.zero_grad(set_to_none=True)
        assert len(parts) > 1 or max_tokens == 10**6
        assert_same(found[1], found[0], 1e-10)


FAMILIES = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 128}),
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, {}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 3}),
    "mistral, window 5": (MistralForCausalLM, MistralConfig, {"sliding_window": 5}),
    "qwen2, one layer with a window of 6": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
}


class TestFamilies:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_computes_what_plain_rows_do(self, family):
        cls, config, fields = FAMILIES[family]
        model, rows = make_model(torch.float32, cls, config, **fields), make_rows(3)
        plain = TokenScorer(model)(rows.clone())["log_prob"]
        sharing, counts = shared(model), tokens_computed(model)
        tree = TokenScorer(model, prefixes=sharing)(rows.clone())["log_prob"]
        assert len(counts) == 1
        assert counts[0] < 0.9 * rows["tokens"].numel()
        assert_same([tree], [plain], 1e-4)
        assert_same(gradients(model, tree), gradients(model, plain), 1e-3)

    @pytest.mark.parametrize(
        ("cls", "config", "fields", "reason"),
        [
            (BloomForCausalLM, BloomConfig, {"n_head": 2, "n_layer": 2}, "its attention is 'eager'"),
            (
                Gemma2ForCausalLM,
                Gemma2Config,
                {"head_dim": 16, "attn_implementation": "eager"},
                "its attention is 'eager'",
            ),
            (
                LlamaForCausalLM,
                LlamaConfig,
                {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
                "the frequencies of its positions depend on a row's length",
            ),
        ],
    )
    def test_refuses_with_a_line_in_the_log(self, caplog, cls, config, fields, reason):
        model = make_model(torch.float32, cls, config, **fields)
        before = model.config._attn_implementation
        with caplog.at_level(logging.WARNING, "torchrl_llm"):
            assert enable_prefix_sharing(model) is None
        (message,) = [record.getMessage() for record in caplog.records]
        assert message.startswith(f"{cls.__name__} ")
        assert reason in message
        assert model.config._attn_implementation == before

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        ("name", "fields", "reason"),
        [
            ("lfm2", {"full_attn_idxs": [1], "block_multiple_of": 8}, r"a state of another kind \(conv\)"),
            (
                "llama4_text",
                {"attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 64},
                "another kind",
            ),
            (
                "deepseek_v32",
                {"index_topk": 4},
                "its code does something else where its attention is not called 'sdpa'",
            ),
        ],
    )
    def test_refuses_layers_of_other_kinds_by_name(self, caplog, name, fields, reason, dtype):
        """On a few tokens, in half precision, some of them would pass for attention."""
        config = AutoConfig.for_model(name, **TINY | {"head_dim": 8} | fields)
        with torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        assert enable_prefix_sharing(model) is None
        assert re.search(reason, caplog.text)
        assert model.config._attn_implementation == "sdpa"

    def test_refuses_what_a_model_asks_of_its_attention(self, monkeypatch, caplog):
        from transformers.models.llama import modeling_llama

        plain = modeling_llama.LlamaAttention.forward
        monkeypatch.setattr(
            modeling_llama.LlamaAttention,
            "forward",
            lambda self, *args, **kwargs: plain(self, *args, **kwargs, s_aux=1),
        )
        assert enable_prefix_sharing(make_model(torch.float32, LlamaForCausalLM, LlamaConfig)) is None
        assert "its attention takes s_aux" in caplog.text

    def test_refuses_code_that_cannot_be_read(self, monkeypatch, caplog):
        monkeypatch.setattr(LlamaForCausalLM(LlamaConfig(**TINY)).model.__class__, "__module__", "builtins")
        assert enable_prefix_sharing(make_model(torch.float32, LlamaForCausalLM, LlamaConfig)) is None
        assert "cannot be read" in caplog.text

    def test_a_model_in_training_mode(self):
        model = make_model(torch.float32, attention_dropout=0.5).train()
        assert enable_prefix_sharing(model) is not None
        assert model.training

    def test_refuses_attention_that_computes_something_else(self, monkeypatch):
        from transformers.models.llama import modeling_llama

        plain = modeling_llama.LlamaAttention.forward

        def scaled(self, *args, **kwargs):
            self.scaling = 0.1 if "prefix_tree" in kwargs else 0.5
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", scaled)
        model = make_model(torch.float32, LlamaForCausalLM, LlamaConfig)
        assert enable_prefix_sharing(model) is None
        assert model.config._attn_implementation == "sdpa"

    def test_attention_that_was_changed_since_is_an_error(self):
        model, rows = make_model(torch.float32), make_rows()
        scorer = TokenScorer(model, prefixes=shared(model))
        model.set_attn_implementation("eager")
        with pytest.raises(RuntimeError, match="is 'eager'; expected 'sdpa_prefixes'"):
            scorer(rows)

    def test_rows_beyond_a_window_that_was_not_tried_are_plain(self):
        model = make_model(torch.float32, MistralForCausalLM, MistralConfig, sliding_window=1024)
        sharing = enable_prefix_sharing(model)
        assert sharing.max_length == 1024
        rows, counts = make_rows(), tokens_computed(model)
        TokenScorer(model, prefixes=Free(*sharing[:2], max_length=10))(rows)
        assert counts[0] % 9 == 0
        assert counts[0] > 10 * 9


class TestLoad:
    def test_actor_critic_and_reference_share(self):
        models = load_actor_critic(make_model(torch.float32), critic=True, reference=True)
        assert all(part.prefixes is not None for part in (models.actor, models.critic, models.reference))
        models = load_actor_critic(make_model(torch.float32), critic=True, share_prefixes=False)
        assert models.actor.prefixes is models.critic.prefixes is None

    def test_files_and_copies(self, tmp_path):
        """The name of the attention is this library's: files for others must not have it, copies in
        this process must."""
        model = make_model(torch.float32)
        sharing = shared(model)
        model.save_pretrained(tmp_path)
        assert ATTENTION not in (tmp_path / "config.json").read_text()
        assert "prefix" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
        rows = make_rows()
        expected = TokenScorer(model, prefixes=sharing)(rows.clone())["log_prob"]
        assert torch.equal(TokenScorer(copy.deepcopy(model), prefixes=sharing)(rows)["log_prob"], expected)

    def test_other_forwards_are_as_before(self):
        """Generation and plain forwards of a prepared model: the same bits."""
        model, ids = make_model(torch.float32), make_rows()["tokens"]
        mask = torch.ones_like(ids)
        mask[:, :3] = 0
        before = model(input_ids=ids).logits, model(input_ids=ids, attention_mask=mask).logits, model.generate(ids)
        shared(model)
        after = model(input_ids=ids).logits, model(input_ids=ids, attention_mask=mask).logits, model.generate(ids)
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one, other)
