"""Responses end where the chat template ends a turn, whatever the model's own settings say."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import one_batch, small_config
from transformers import PreTrainedTokenizerFast

from torchrl_llm import keys
from torchrl_llm.runs import build_run
from torchrl_llm.testing.environments import Echo
from torchrl_llm.testing.tiny import random_model
from torchrl_llm.testing.tokenizers import byte_tokenizer

TEMPLATES = Path(__file__).parents[1] / "envs" / "templates"
STYLES = {
    "gemma": ("<eos>", "<end_of_turn>", ("<pad>", "<bos>", "<start_of_turn>")),
    "phi": ("<|endoftext|>", "<|end|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")),
    "qwen2_5": ("<|im_end|>", "<|im_end|>", ()),
}


@pytest.fixture(params=STYLES)
def model(request, tmp_path):
    """A model in the style of a family: its folder, its tokenizer, and the names of its end of text
    and of a turn."""
    end, turn_end, other = STYLES[request.param]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer().backend_tokenizer,
        eos_token=end,
        pad_token="<|endoftext|>",
        additional_special_tokens=[turn_end, *other],
        chat_template=(TEMPLATES / f"{request.param}.jinja").read_text(),
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    # its generation config names the end of text alone
    random_model(tokenizer).save_pretrained(tmp_path / "model")
    return tmp_path, tokenizer, end, turn_end


class TestTurnEnd:
    @pytest.mark.parametrize("config_of_its_own", [True, False])
    def test_responses_end_where_the_template_ends_a_turn(self, model, config_of_its_own, caplog):
        where, tokenizer, end, turn_end = model
        if not config_of_its_own:
            (where / "model" / "generation_config.json").unlink()
        config = small_config(
            where, model_path=str(where / "model"), tokenizer_path=str(where / "tokenizer"), min_output_tokens=2,
            max_output_tokens=64, batch_size=32, kl_coeff=0.1,
        )  # fmt: skip
        run = build_run(config, env=Echo)
        ends = sorted({tokenizer.convert_tokens_to_ids(name) for name in (end, turn_end)})
        assert run.policy.stop_ids == tuple(ends)
        # What is held back until min_output_tokens is held back by the scorer too.
        assert run.models.actor.held_back == run.models.reference.held_back == tuple(ends)
        assert "does not stop" not in caplog.text
        rows = one_batch(run)
        stops = sum((rows[keys.TOKENS] == i) & (rows[keys.TURN_IDS] >= 0) for i in ends).bool()
        assert stops.any()
        following = rows[keys.TURN_IDS].roll(-1, dims=1)
        following[:, -1] = -1
        assert (following != rows[keys.TURN_IDS])[stops].all(), "a response continues after its end"
