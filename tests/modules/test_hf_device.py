"""What sampling with HFPolicy asks of a GPU: how often it waits for one. On the pretended device."""

from __future__ import annotations

from tiny_policies import batch_of, make_model, make_policy, random_rows

from torchrl_llm.testing.pretended_gpu import pretended_gpu


def waits_of_a_turn(width, **options):
    """Waits of a turn of ``width`` tokens, none of which ends a response, and of what is set up once, none."""
    with pretended_gpu() as gpu:
        # Stop ids are held back up to the last token, so no row is taken out of the batch.
        options = {"max_output_tokens": width, "min_output_tokens": width, "stop_ids": (2, 3, 4)} | options
        policy = make_policy(make_model().to("cuda"), **options)
        turn = batch_of(random_rows([5, 9, 7, 11])).to("cuda")
        policy(turn.clone())
        policy.drop_cache()
        gpu.reset()
        policy(turn.clone())
        return gpu.waits.total()


class TestWaits:
    def test_one_in_eight_tokens(self):
        # Of 40 tokens, the look at the last one is spared: the response ends there anyway.
        assert waits_of_a_turn(40) - waits_of_a_turn(8) == 4

    def test_as_many_as_were_asked_for(self):
        assert waits_of_a_turn(33, check_every=1) - waits_of_a_turn(33, check_every=16) == 30
