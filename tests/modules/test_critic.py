"""TurnCritic: which prefix each value belongs to, on random tiny Qwen2 models."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2Model

from torchrl_llm.modules.adapters import use_adapter
from torchrl_llm.modules.critic import TurnCritic


def make_model(dtype: torch.dtype = torch.float32) -> Qwen2Model:
    config = Qwen2Config(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen2Model(config).to(dtype).eval()


def make_critic(model, **kwargs) -> TurnCritic:
    critic = TurnCritic(model, **kwargs)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        critic.value_head.weight.normal_(generator=generator)
        critic.value_head.bias.fill_(0.5)
    return critic


@pytest.fixture
def rows() -> TensorDict:
    tokens = torch.randint(0, 48, (3, 10), generator=torch.Generator().manual_seed(2))
    lengths = torch.tensor([7, 10, 4])
    turn_ids = torch.tensor(
        [
            [-1, -1, 0, 0, -1, 1, -1, -1, -1, -1],
            [-1, 0, 0, -1, -1, 1, 1, -1, 2, 2],
            [-1, -1, -1, 0, -1, -1, -1, -1, -1, -1],
        ]
    )
    mask = torch.arange(10) < lengths.unsqueeze(-1)
    return TensorDict(tokens=tokens, attention_mask=mask, turn_ids=turn_ids, batch_size=[3])


def value_of_prefix(critic: TurnCritic, tokens: torch.Tensor) -> torch.Tensor:
    """The value of one unpadded prefix, alone."""
    return critic.value_head(critic.model(input_ids=tokens.unsqueeze(0)).last_hidden_state[0, -1].float()).squeeze(-1)


class TestTurnCritic:
    def test_every_value_is_that_of_the_prefix_before_the_token(self, rows):
        critic = make_critic(make_model())
        td = critic(rows)
        for row in range(3):
            for place in range(10):
                value = td["state_value"][row, place]
                if rows["turn_ids"][row, place] >= 0:
                    expected = value_of_prefix(critic, rows["tokens"][row, :place])
                    torch.testing.assert_close(value, expected, rtol=0, atol=1e-5)
                else:
                    assert value == 0
            whole = rows["tokens"][row, : int(rows["attention_mask"][row].sum())]
            torch.testing.assert_close(td["bootstrap_value"][row], value_of_prefix(critic, whole), rtol=0, atol=1e-5)

    def test_does_not_look_at_the_action(self, rows):
        critic = make_critic(make_model())
        before = critic(rows.clone())
        changed = rows.clone()
        changed["tokens"][1, 8:] = (changed["tokens"][1, 8:] + 1) % 48  # the last turn's tokens
        after = critic(changed)
        assert torch.equal(before["state_value"][1, :9], after["state_value"][1, :9])
        assert before["state_value"][1, 9] != after["state_value"][1, 9]
        assert before["bootstrap_value"][1] != after["bootstrap_value"][1]

    def test_starts_at_zero_and_draws_nothing(self, rows):
        state = torch.get_rng_state()
        critic = TurnCritic(make_model())
        assert torch.equal(state, torch.get_rng_state())
        td = critic(rows)
        assert (td["state_value"] == 0).all()
        assert (td["bootstrap_value"] == 0).all()
        (td["state_value"].sum() + td["bootstrap_value"].sum()).backward()
        assert critic.value_head.weight.grad.abs().max() > 0

    def test_padding_changes_nothing(self, rows):
        critic = make_critic(make_model())
        td = critic(rows.clone())
        pad = lambda x, value: torch.nn.functional.pad(x, (0, 5), value=value)  # noqa: E731
        wide = critic.value(pad(rows["tokens"], 1), pad(rows["attention_mask"], False), pad(rows["turn_ids"], -1))
        torch.testing.assert_close(wide[0][:, :10], td["state_value"], rtol=0, atol=1e-5)
        torch.testing.assert_close(wide[1], td["bootstrap_value"], rtol=0, atol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_values_are_float32_or_wider(self, rows, dtype):
        critic = make_critic(make_model(dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
            td = critic(rows)
        expected = torch.promote_types(dtype, torch.float32)
        assert td["state_value"].dtype == td["bootstrap_value"].dtype == critic.value_head.weight.dtype == expected

    def test_adapter(self, rows):
        model = make_model()
        lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        expected = make_critic(model)(rows.clone())["state_value"].detach()
        model = get_peft_model(model, lora, adapter_name="critic")
        value = make_critic(model, adapter="critic")(rows.clone())["state_value"]
        assert not torch.allclose(value, expected)
        value.sum().backward()
        assert model.base_model.model.layers[0].self_attn.q_proj.lora_A["critic"].weight.grad.abs().max() > 0
        with use_adapter(model, "critic"):  # whatever is active outside
            assert torch.equal(make_critic(model)(rows.clone())["state_value"], expected)
