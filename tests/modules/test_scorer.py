"""TokenScorer against a naive full forward, on random tiny Qwen2 models."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict
from tiny_models import TINY, VOCABULARY, make_model
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from torchrl_llm.modules.checks import UnsupportedHeadError, VocabularyMismatchError, check_head, check_vocabulary
from torchrl_llm.modules.critic import TurnCritic
from torchrl_llm.modules.policy import SamplingConfig
from torchrl_llm.modules.positions import RowError, action_positions
from torchrl_llm.modules.scorer import TokenScorer, entropy_of


def make_rows(batch: int = 5, length: int = 30, seed: int = 0) -> TensorDict:
    """Random conversations: prompt, then turns of 2 to 5 action tokens with feedback of 0 to 3
    tokens in between."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    tokens = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
    turn_ids = torch.full((batch, length), -1)
    lengths = torch.zeros(batch, dtype=torch.int64)
    for row in range(batch):
        place = integer(1, 6)
        for turn in range(integer(1, 3)):
            actions = integer(2, 5)
            turn_ids[row, place : place + actions] = turn
            place += actions + integer(0, 3)
        lengths[row] = min(place, length)
    mask = torch.arange(length) < lengths.unsqueeze(-1)
    return TensorDict(
        tokens=tokens.masked_fill(~mask, 0),
        attention_mask=mask,
        turn_ids=turn_ids.masked_fill(~mask, -1),
        batch_size=[batch],
    )


def naive_log_softmax(model, rows, temperature: float = 1.0) -> torch.Tensor:
    """Row by row without padding, all logits, ``[B, L, V]``: index i is the distribution of token
    i."""
    batch, length = rows["tokens"].shape
    out = torch.zeros(batch, length, VOCABULARY, dtype=torch.float64)
    for row in range(batch):
        n = int(rows["attention_mask"][row].sum())
        logits = model(input_ids=rows["tokens"][row : row + 1, :n]).logits[0]
        out[row, 1:n] = (logits[:-1].double() / temperature).log_softmax(-1)
    return out


def naive_log_prob(model, rows, temperature: float = 1.0) -> torch.Tensor:
    log_prob = naive_log_softmax(model, rows, temperature).gather(-1, rows["tokens"].unsqueeze(-1)).squeeze(-1)
    return torch.where(rows["turn_ids"] >= 0, log_prob, 0.0)


class TestTokenScorer:
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_equals_a_full_forward_in_float32(self, temperature):
        model, rows = make_model(torch.float32), make_rows()
        scorer = TokenScorer(model, SamplingConfig(temperature=temperature))
        log_prob = scorer(rows)["log_prob"]
        assert log_prob.dtype == torch.float32
        assert log_prob.shape == rows["tokens"].shape
        assert float(log_prob.detach().min()) < -4
        torch.testing.assert_close(log_prob.double(), naive_log_prob(model, rows, temperature), rtol=0, atol=5e-6)

    def test_equals_a_full_forward_in_float64_with_gradient(self, exact_norms):
        model, rows = make_model(), make_rows()
        upstream = torch.randn(rows["tokens"].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        gradients = []
        for log_prob in (TokenScorer(model)(rows)["log_prob"], naive_log_prob(model, rows)):
            (log_prob * upstream).sum().backward()
            gradients.append({name: p.grad for name, p in model.named_parameters()})
            model.zero_grad(set_to_none=True)
        torch.testing.assert_close(rows["log_prob"].detach(), naive_log_prob(model, rows).detach(), rtol=0, atol=1e-12)
        for name, grad in gradients[1].items():
            torch.testing.assert_close(gradients[0][name], grad, rtol=1e-9, atol=1e-11)

    def test_padding_and_batch_split_change_nothing(self, exact_norms):
        model, rows = make_model(), make_rows()
        scorer = TokenScorer(model)
        whole = scorer(rows)["log_prob"]
        pad = lambda x, value: torch.nn.functional.pad(x, (0, 17), value=value)  # noqa: E731
        tokens = torch.where(rows["attention_mask"], rows["tokens"], 7)
        wide = scorer.score(pad(tokens, 9), pad(rows["attention_mask"], False), pad(rows["turn_ids"], -1))[0]
        torch.testing.assert_close(wide[:, :-17], whole, rtol=0, atol=1e-12)
        assert (wide[:, -17:] == 0).all()
        split = torch.cat([scorer(part)["log_prob"] for part in rows.split(2)])
        torch.testing.assert_close(split, whole, rtol=0, atol=1e-12)

    def test_chunks_change_neither_value_nor_gradient(self, exact_norms):
        model, rows = make_model(), make_rows()
        results = []
        for chunk in (2**26, 3 * VOCABULARY):
            td = TokenScorer(model, entropy=True, chunk_logits=chunk)(rows.clone())
            (td["log_prob"].square().sum() + td["entropy"].sum()).backward()
            results.append((td["log_prob"].detach(), model.lm_head.weight.grad, model.model.norm.weight.grad))
            model.zero_grad(set_to_none=True)
        for one, many in zip(*results, strict=True):
            torch.testing.assert_close(one, many, rtol=1e-10, atol=1e-12)

    def test_only_one_chunk_of_logits_is_kept_for_backward(self):
        model, rows = make_model(torch.float32), make_rows(batch=8)
        kept = {}
        for chunk in (2**26, 4 * VOCABULARY):
            saved = []

            def keep(x, saved=saved):
                saved.append(tuple(x.shape))
                return x

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                TokenScorer(model, chunk_logits=chunk)(rows.clone())
            kept[chunk] = sum(
                shape[0] for shape in saved if shape[1:] == (VOCABULARY,) and shape != model.lm_head.weight.T.shape
            )
        actions = int((rows["turn_ids"] >= 0).sum())
        assert kept[2**26] >= actions
        assert kept[4 * VOCABULARY] == 0

    def test_head_sees_action_positions_only(self):
        model, rows = make_model(), make_rows()
        seen = []
        model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
        model.model.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
        )
        TokenScorer(model)(rows)
        last = int((rows["turn_ids"] >= 0).nonzero()[:, 1].max())
        assert seen == [(5, last), (int((rows["turn_ids"] >= 0).sum()), TINY["hidden_size"])]

    def test_entropy_is_exact(self, exact_norms):
        model, rows = make_model(), make_rows()
        td = TokenScorer(model, SamplingConfig(temperature=1.3), entropy=True)(rows)
        log_probs = naive_log_softmax(model, rows, 1.3)
        expected = torch.where(rows["turn_ids"] >= 0, -(log_probs.exp() * log_probs).sum(-1), 0.0)
        torch.testing.assert_close(td["entropy"], expected, rtol=0, atol=1e-12)

    def test_stop_ids_are_held_back_at_the_start_of_each_turn(self, exact_norms):
        model, rows = make_model(), make_rows()
        rows["tokens"][rows["tokens"] == 5] = 6
        rows["tokens"][rows["tokens"] == 9] = 8
        sampling = SamplingConfig(min_output_tokens=2, temperature=0.8, stop_ids=(5, 9))
        td = TokenScorer(model, sampling, entropy=True)(rows)
        logits = naive_log_softmax(model, rows, 0.8)
        for row, turns in enumerate(rows["turn_ids"].tolist()):
            for place, turn in enumerate(turns):
                if turn >= 0 and turns[:place].count(turn) < 2:
                    logits[row, place, [5, 9]] = -torch.inf
        log_probs = logits.log_softmax(-1)
        actions = rows["turn_ids"] >= 0
        chosen = log_probs.gather(-1, rows["tokens"].unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(td["log_prob"], torch.where(actions, chosen, 0.0), rtol=0, atol=1e-12)
        expected = torch.where(actions, -(log_probs.exp() * log_probs.clamp(min=-1e300)).sum(-1), 0.0)
        torch.testing.assert_close(td["entropy"], expected, rtol=0, atol=1e-12)
        (td["log_prob"] + td["entropy"]).sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        with pytest.raises(ValueError, match="stop_ids is None"):
            TokenScorer(model, SamplingConfig(min_output_tokens=2))

    def test_truncation_is_left_out_unless_asked_for(self, exact_norms):
        model, rows = make_model(), make_rows()
        sampling = SamplingConfig(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2)
        plain = TokenScorer(model, sampling)(rows.clone())["log_prob"]
        assert torch.equal(plain, TokenScorer(model, SamplingConfig(temperature=0.8))(rows.clone())["log_prob"])
        with pytest.raises(ValueError, match=r"repetition_penalty=1\.2"):
            TokenScorer(model, sampling, truncate=True)
        td = TokenScorer(model, SamplingConfig(top_k=20), truncate=True, entropy=True)(rows)
        logits = naive_log_softmax(model, rows)
        log_probs = logits.masked_fill(logits < logits.topk(20).values[..., -1:], -torch.inf).log_softmax(-1)
        actions = rows["turn_ids"] >= 0
        chosen = torch.where(actions, log_probs.gather(-1, rows["tokens"].unsqueeze(-1)).squeeze(-1), 0.0)
        assert (chosen == -torch.inf).any()
        assert (chosen[actions] > -torch.inf).any()
        torch.testing.assert_close(td["log_prob"], chosen, rtol=0, atol=1e-12)
        expected = torch.where(actions, -(log_probs.exp() * log_probs.clamp(min=-1e300)).sum(-1), 0.0)
        torch.testing.assert_close(td["entropy"], expected, rtol=0, atol=1e-12)

    def test_rows_without_actions_still_give_a_graph(self):
        model, rows = make_model(), make_rows()
        rows["turn_ids"].fill_(-1)
        log_prob = TokenScorer(model)(rows)["log_prob"]
        assert (log_prob == 0).all()
        log_prob.sum().backward()
        assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())

    def test_adapter_and_frozen(self):
        lora = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        model, rows = get_peft_model(make_model(), lora, adapter_name="actor"), make_rows()
        actor = TokenScorer(model, adapter="actor")(rows.clone())["log_prob"]
        base = TokenScorer(model, frozen=True, log_prob_key="ref_log_prob")(rows.clone())["ref_log_prob"]
        assert actor.requires_grad
        assert not base.requires_grad
        assert not torch.allclose(actor, base)
        # Not the same bits: a head with LoRA has its logits made otherwise than a plain one.
        torch.testing.assert_close(base, TokenScorer(make_model())(rows)["log_prob"].detach(), rtol=0, atol=1e-12)

    def test_chunk_recomputation_runs_under_the_adapter_of_the_forward(self):
        lora = LoraConfig(r=4, target_modules=["v_proj", "lm_head"], init_lora_weights=False)
        model, rows = get_peft_model(make_model(), lora, adapter_name="actor"), make_rows()
        gradients = []
        for chunk in (2**26, 3 * VOCABULARY):
            log_prob = TokenScorer(model, adapter="actor", chunk_logits=chunk)(rows.clone())["log_prob"]
            with model.disable_adapter():
                model.set_requires_grad("actor", True)
                log_prob.sum().backward()
            gradients.append([p.grad for p in model.parameters() if p.requires_grad])
            model.zero_grad(set_to_none=True)
        for one, many in zip(*gradients, strict=True):
            assert one.abs().max() > 0
            torch.testing.assert_close(one, many, rtol=1e-5, atol=1e-9)

    @pytest.mark.parametrize(
        ("cls", "config", "fields"),
        [
            (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 16, "final_logit_softcapping": 2.0, "sliding_window": 8}),
            (CohereForCausalLM, CohereConfig, {"logit_scale": 0.25}),
        ],
    )
    def test_other_families(self, cls, config, fields):
        fields = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | fields
        model, rows = make_model(torch.float32, cls, config, **fields), make_rows()
        check_head(model)
        log_prob = TokenScorer(model)(rows)["log_prob"]
        torch.testing.assert_close(log_prob.double(), naive_log_prob(model, rows), rtol=0, atol=1e-5)

    def test_bfloat16_scores_are_float32(self):
        rows = make_rows()
        assert TokenScorer(make_model(torch.bfloat16))(rows)["log_prob"].dtype == torch.float32


ROPES = {
    "dynamic": (LlamaForCausalLM, LlamaConfig, {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
    "longrope": (
        Phi3ForCausalLM,
        Phi3Config,
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0 + i for i in range(8)],
        },
    ),
}


def make_moving_rope(kind: str):
    """A model whose rotary frequencies change where the input is longer than 32 tokens."""
    cls, config, rope = ROPES[kind]
    length = 32 if kind == "dynamic" else 128
    rope = rope | {"original_max_position_embeddings": 32}
    # of 16 numbers each, which 8 factors are for
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    fields = heads | {"original_max_position_embeddings": 32, "max_position_embeddings": length}
    return make_model(torch.float32, cls, config, rope_parameters=rope, **fields)


def make_long_rows() -> TensorDict:
    """Rows of 20 to 90 tokens with an action in the middle and one at the end; the 32nd token is an
    action of two rows."""
    lengths = torch.tensor([20, 90, 33, 32, 60])
    tokens = torch.randint(1, VOCABULARY, (5, 90), generator=torch.Generator().manual_seed(0))
    turn_ids = torch.full_like(tokens, -1)
    for row, length in enumerate(lengths.tolist()):
        turn_ids[row, 8:12] = 0
        turn_ids[row, length - 3 : length] = 1
    mask = torch.arange(90) < lengths.unsqueeze(-1)
    return TensorDict(tokens=tokens * mask, attention_mask=mask, turn_ids=turn_ids, batch_size=[5])


@pytest.mark.parametrize("kind", ROPES)
class TestMovingRope:
    """Rotary frequencies that depend on the length of the input: of a row's own length, whatever it
    is batched with."""

    def test_a_row_is_scored_as_if_it_were_alone(self, kind):
        model, rows = make_moving_rope(kind), make_long_rows()
        found = TokenScorer(model)(rows)["log_prob"]
        for i, row in enumerate(rows.split(1)):
            n = int(row["attention_mask"].sum())
            ids, there = row["tokens"][:, :n], row["turn_ids"][0, 1:n] >= 0
            alone = copy.deepcopy(model)(input_ids=ids[:, :-1]).logits[0].log_softmax(-1)
            expected = alone.gather(-1, ids[0, 1:].unsqueeze(-1)).squeeze(-1)[there]
            torch.testing.assert_close(found[i, 1:n][there], expected, rtol=0, atol=1e-4)

    def test_a_value_is_that_of_its_row_alone(self, kind):
        critic, rows = TurnCritic(make_moving_rope(kind)), make_long_rows()
        torch.nn.init.ones_(critic.value_head.weight)
        found = critic(rows.clone())
        alone = torch.cat([critic(row.clone()) for row in rows.split(1)])
        for key in ("state_value", "bootstrap_value"):
            torch.testing.assert_close(found[key], alone[key], rtol=0, atol=1e-4)

    def test_the_gradient_is_the_sum_over_rows(self, kind):
        model, rows = make_moving_rope(kind), make_long_rows()
        grads = []
        for parts in ([rows], rows.split(1)):
            for part in parts:
                TokenScorer(model)(part.clone())["log_prob"].sum().backward()
            grads.append([parameter.grad.clone() for parameter in model.parameters()])
            model.zero_grad(set_to_none=True)
        for one, many in zip(*grads, strict=True):
            torch.testing.assert_close(one, many, rtol=1e-3, atol=1e-3 * float(many.abs().max()))

    def test_a_batch_leaves_nothing_behind(self, kind):
        model, rows = make_moving_rope(kind), make_long_rows()
        ids = rows["tokens"][3:4, :32]
        before = model(input_ids=ids).logits
        TokenScorer(model)(rows)
        assert torch.equal(model(input_ids=ids).logits, before)


class TestActionPositions:
    @pytest.mark.parametrize(
        ("mask", "turn_ids", "match"),
        [
            ([[0, 1, 1]], [[-1, -1, 0]], "right-padded"),
            ([[0, 0, 0]], [[-1, -1, -1]], "without any token"),
            ([[1, 1, 1]], [[0, 0, -1]], "no token precedes it"),
            ([[1, 1, 0]], [[-1, 0, 0]], "marks padding as an action"),
            ([[1, 1]], [[-1, 0, 0]], r"must both be \[B, L\]"),
        ],
    )
    def test_named_errors(self, mask, turn_ids, match):
        with pytest.raises(RowError, match=match):
            action_positions(torch.tensor(mask), torch.tensor(turn_ids))

    def test_index_in_turn(self):
        turn_ids = torch.tensor([[-1, 0, 0, 1, 1, 1, -1, 2], [-1, -1, 4, -1, 5, 5, -1, -1]])
        positions = action_positions(torch.ones_like(turn_ids), turn_ids)
        assert positions.index_in_turn(turn_ids).tolist() == [0, 1, 0, 1, 2, 0, 0, 0, 1]


class TestLanguageModel:
    def test_entropy_of_has_a_finite_gradient_at_minus_infinity(self):
        logits = torch.tensor([0.0, 1.0, -torch.inf], requires_grad=True)
        entropy_of(logits.log_softmax(-1)).backward()
        assert logits.grad.isfinite().all()

    def test_check_head_refuses_an_unknown_head(self):
        model = make_model()
        check_head(model)
        forward = model.forward

        def scaled(*args, **kwargs):
            output = forward(*args, **kwargs)
            output.logits = output.logits * 1.5
            return output

        model.forward = scaled
        with pytest.raises(UnsupportedHeadError, match="Qwen2ForCausalLM"):
            check_head(model)

    def test_check_vocabulary(self):
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        def tokenizer(size):
            vocabulary = {f"t{i}": i for i in range(size)}
            return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")))

        model = make_model(eos_token_id=[2, 40])
        check_vocabulary(model, tokenizer(VOCABULARY))
        check_vocabulary(model, tokenizer(41))
        with pytest.raises(VocabularyMismatchError, match=r"ids up to 48.*embeds only 48"):
            check_vocabulary(model, tokenizer(VOCABULARY + 1))
        with pytest.raises(VocabularyMismatchError, match=r"config.eos_token_id': \[2, 40\]"):
            check_vocabulary(model, tokenizer(40))
